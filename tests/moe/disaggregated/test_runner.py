"""Two sides give what one device gives, in whatever parts and by whatever way."""

import numpy as np
import pytest
from two_sides import CONFIG, MIXED, live, one_side, sides, split_mesh, two_sides

from moe.disaggregated.runner import Runner

CLOSE = 1e-6
"""float32 of size 1: the sums of a token's experts come in another order."""


def check(runner, weights, micro_batches, config):
    logits, choices, of_prompts = two_sides(runner, weights, micro_batches)
    wanted, wanted_choices, wanted_of_prompts = one_side(config)
    np.testing.assert_allclose(logits[live()], wanted[live()], atol=CLOSE)
    np.testing.assert_array_equal(choices, wanted_choices)
    np.testing.assert_array_equal(of_prompts, wanted_of_prompts)


@pytest.mark.parametrize(
    ("split", "micro_batches", "config"),
    [
        ("tp2 dp2 / ep2", 2, MIXED),
        ("dp1 / ep1", 4, CONFIG),
        ("dp2 / ep2", 2, CONFIG),
        ("dp4 / ep12", 1, CONFIG),
        ("tp2 / ep3 etp2", 3, CONFIG),
    ],
)
def test_two_sides_are_one(split, micro_batches, config):
    mesh = split_mesh(split)
    check(Runner(config, mesh, records_choices=True), sides(mesh, config), micro_batches, config)
