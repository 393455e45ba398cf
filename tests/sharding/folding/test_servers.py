"""Devices of a group that are in one server."""

import math

import pytest

from sharding.costs.transfer import group_strides
from sharding.folding import Layout, fold_abstract
from sharding.folding.groups import axis_groups, server_groups

LAYOUTS = [
    "dp64 / ep64",
    "tp2 dp4 / ep4 etp2",
    "tp2 cp2 dp4 / ep4 etp2",
    "pp2 dp8 / ep4",
    "tp3 dp4 / ep2 etp6",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("server_devices", [1, 2, 4, 8])
def test_groups_are_of_one_server_or_of_one_device_of_each(layout, server_devices):
    mesh = fold_abstract(Layout.parse(layout))
    try:
        split = server_groups(mesh, mesh.ep, server_devices)
    except ValueError:
        assert "tp3" in layout
        return
    assert split.servers * split.devices == mesh.size(mesh.ep)
    for group in axis_groups(mesh, mesh.ep):
        for inside in split.inside:
            assert len({group[index] // server_devices for index in inside}) == 1
        for across in split.across:
            assert len({group[index] // server_devices for index in across}) == split.servers
    for groups, side in ((split.inside, "inside"), (split.across, "across")):
        assert sorted(index for group in groups for index in group) == list(
            range(mesh.size(mesh.ep))
        )
        # The planner counts the same with no mesh.
        sizes = [size for _, size in group_strides(("ep",), side, mesh.layout, server_devices)]
        assert math.prod(sizes) == len(groups[0])


@pytest.mark.parametrize(
    ("layout", "server_devices", "parts"),
    [("dp12 / ep12", 8, "8, 4"), ("dp12 / ep4", 6, "2, 2|4")],
)
def test_unequal_parts_are_refused(layout, server_devices, parts):
    mesh = fold_abstract(Layout.parse(layout))
    with pytest.raises(ValueError, match=rf"servers of {server_devices} .* such as ({parts}): ch"):
        server_groups(mesh, mesh.ep, server_devices)
