"""Description of a layout on the command line: groups, roles and the picture."""

import numpy as np
import pytest

from sharding.folding import Layout, fold_abstract
from sharding.folding.groups import axis_groups, axis_ranks, describe

SIXTEEN = Layout.parse("tp2 cp2 dp2 pp2 / ep4 etp1")


def test_description_of_sixteen_ranks():
    pairs = "[0,4] [1,5] [2,6] [3,7] [8,12] [9,13] [10,14] [11,15]"
    assert describe(SIXTEEN).splitlines() == [
        "tp2 cp2 dp2 pp2 / ep4 etp1 edp2, 16 devices",
        "TP       [0,1] [2,3] [4,5] [6,7] [8,9] [10,11] [12,13] [14,15]",
        "CP       [0,2] [1,3] [4,6] [5,7] [8,10] [9,11] [12,14] [13,15]",
        f"DP       {pairs}",
        "DP x CP  [0,2,4,6] [1,3,5,7] [8,10,12,14] [9,11,13,15]",
        "PP       [0,8] [1,9] [2,10] [3,11] [4,12] [5,13] [6,14] [7,15]",
        "ETP      every rank by itself",
        "EP       [0,1,2,3] [4,5,6,7] [8,9,10,11] [12,13,14,15]",
        f"EDP      {pairs}",
    ]


@pytest.mark.parametrize("text", ["tp2 cp3 dp4 pp5 / ep6 etp2", "tp2 dp3 / etp3"])
def test_roles_are_the_places_in_the_groups(text):
    mesh = fold_abstract(Layout.parse(text))
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp"):
        index = np.array(axis_ranks(mesh, axis))
        for group in axis_groups(mesh, getattr(mesh, axis)):
            assert index[group].tolist() == list(range(len(group)))
