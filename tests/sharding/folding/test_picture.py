"""The picture of a folding."""

import numpy as np
import pytest
from matplotlib.image import imread

from sharding.folding import Layout
from sharding.folding.groups import draw

SIXTEEN = Layout.parse("tp2 cp2 dp2 pp2 / ep4 etp1")


@pytest.mark.slow
def test_the_picture_shows_both_sides(tmp_path):
    draw(SIXTEEN, tmp_path / "folding.png")
    image = imread(tmp_path / "folding.png")[..., :3]
    # Four sets of sequences and eight sets of experts: at least twelve fills beside the white.
    _, count = np.unique((image * 255).astype(int).reshape(-1, 3), axis=0, return_counts=True)
    assert (count > image.shape[0] * image.shape[1] // 200).sum() >= 1 + 8
