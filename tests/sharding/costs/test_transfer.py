"""Links that a group uses and seconds of a transfer, on sizes that one can follow by hand."""

from dataclasses import replace
from itertools import combinations

import pytest

from sharding.costs.hardware import LINK_EFFICIENCY, Hardware
from sharding.costs.transfer import Transfer, mean_destinations
from sharding.folding import Layout, fold_abstract
from sharding.folding.groups import axis_groups

CLUSTER = Hardware(
    "two", 1e12, 1e9, 1e11, 8, 100.0 / LINK_EFFICIENCY, 10.0 / LINK_EFFICIENCY, 0.0, 0.0
)


def moves(kind, axes, elements=40):
    return Transfer("it", kind, axes, elements, 1)


@pytest.mark.parametrize(
    "layout", ["tp2 cp2 dp4 / ep4 etp2", "tp4 dp4 / ep8", "dp8 pp2 / ep2 etp4", "cp4 dp4 / ep4"]
)
@pytest.mark.parametrize("domain", [2, 4, 8])
def test_members_in_a_domain_are_those_of_the_mesh(layout, domain):
    sizes = Layout.parse(layout)
    mesh, hardware = fold_abstract(sizes), Hardware("x", 1.0, 1.0, 1.0, domain, 1.0, 1.0)
    for axes in (
        *[(axis,) for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp")],
        ("cp", "tp"),
        ("dp", "cp"),
        ("ep", "etp"),
        ("dp", "cp", "tp"),
    ):
        named = [atom for axis in axes for atom in getattr(mesh, axis)]
        group = axis_groups(mesh, named)[0]
        together = sum(rank // domain == group[0] // domain for rank in group)
        assert moves("all_gather", axes).members_in_domain(sizes, hardware) == together, axes


@pytest.mark.parametrize(
    ("kind", "layout", "axes", "seconds"),
    [
        # Seven times 40 bytes at 100 bytes/s.
        ("all_gather", "tp8", ("tp",), 2.8),
        ("reduce_scatter", "tp8", ("tp",), 0.35),
        ("all_reduce", "tp8", ("tp",), 0.7),
        ("all_to_all", "dp8 / ep8", ("ep",), 0.35),
        ("permute", "cp8", ("cp",), 0.4),
        ("permute", "dp8 pp2", ("pp",), 4.0),
        # Sixteen in two domains: eight adapters of 10 bytes/s together.
        ("all_gather", "dp16", ("dp",), 40 * 15 / 80),
        # Two of each domain, and then one.
        ("all_gather", "tp4 dp4", ("dp",), 40 * 3 / 20),
        ("all_gather", "tp8 dp4", ("dp",), 40 * 3 / 10),
        # Half of what is sent goes outside, eight peers' shares.
        ("all_to_all", "dp16 / ep16", ("ep",), 40 * 8 / 16 / 10),
        ("all_gather", "tp8", ("dp",), 0.0),
    ],
)
def test_transfer_seconds(kind, layout, axes, seconds):
    assert moves(kind, axes).seconds(Layout.parse(layout), CLUSTER) == pytest.approx(seconds)


def test_an_all_to_all_has_its_own_part_of_the_rate():
    slower, layout = replace(CLUSTER, exchange=0.5), Layout.parse("dp16 / ep16")
    takes = [
        moves(kind, axes).seconds(layout, slower) / moves(kind, axes).seconds(layout, CLUSTER)
        for kind, axes in (("all_to_all", ("ep",)), ("all_gather", ("dp",)), ("permute", ("ep",)))
    ]
    assert takes == pytest.approx([2.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "layout", ["tp2 cp2 dp4 / ep4 etp2", "tp2 cp4 dp2 / ep4", "tp4 cp2 dp4 pp2 / ep2", "dp8 / ep4"]
)
@pytest.mark.parametrize("domain", [2, 4, 8])
def test_stages_of_a_group_are_those_of_the_mesh(layout, domain):
    sizes = Layout.parse(layout)
    mesh, hardware = fold_abstract(sizes), Hardware("x", 1.0, 1.0, 1.0, domain, 1.0, 1.0)
    for axes in (("dp", "cp"), ("edp",), ("dp", "cp", "tp"), ("pp", "dp", "cp")):
        for side in ("inside", "across"):
            one = Transfer("it", "all_gather", axes, 40, 1, side=side)
            named = [
                atom
                for axis in axes
                for atom in getattr(mesh, axis)
                if (atom in mesh.sequence) == (side == "inside")
            ]
            group = axis_groups(mesh, named)[0]
            assert one.group(sizes) == len(group), (axes, side)
            together = sum(rank // domain == group[0] // domain for rank in group)
            assert one.members_in_domain(sizes, hardware) == together, (axes, side)


def test_bytes_sent_by_a_device():
    layout = Layout.parse("tp8")
    sent = {
        kind: moves(kind, ("tp",)).sent(layout)
        for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "permute")
    }
    assert sent == {
        "all_gather": 280,
        "reduce_scatter": 35,
        "all_to_all": 35,
        "all_reduce": 70,
        "permute": 40,
    }


@pytest.mark.parametrize(
    ("experts", "k", "block", "places"), [(8, 2, 1, 4), (8, 3, 1, 2), (12, 4, 2, 3), (12, 4, 4, 6)]
)
def test_copies_of_a_token_are_the_mean_over_all_choices(experts, k, block, places):
    """Every set of blocks of neighbouring experts, counted one by one."""
    result = [
        len({(block * one + n) // (experts // places) for one in chosen for n in range(block)})
        for chosen in combinations(range(experts // block), k // block)
    ]
    assert mean_destinations(experts, k, block, places) == pytest.approx(sum(result) / len(result))


def test_one_copy_of_a_token_goes_to_a_domain_and_there_to_a_device():
    """Sixteen devices of one expert each in two domains, two experts of a token: 20 tokens."""
    layout = Layout.parse("dp16 / ep16")
    one = Transfer("it", "all_to_all", ("ep",), 40, 1, routed=(16, 2, 1))
    to_both = 1 - 2 * 28 / 120  # of pairs of experts, those in one domain: 2 C(8, 2) / C(16, 2)
    outside = 20 * (1 + to_both) / 2 / 10
    inside = 20 * 2 * 7 / 8 / 100
    assert one.seconds(layout, CLUSTER) == pytest.approx(max(inside, outside))
    assert one.seconds(layout, replace(CLUSTER, outside=1e9)) == pytest.approx(inside)
    # Half of the copies of each token leave a domain if each is sent alone.
    assert one.seconds(layout, CLUSTER) < replace(one, routed=None).seconds(layout, CLUSTER)
    assert one.transposed(layout).routed == one.routed
    # All experts on one device of a block: one copy.
    block = replace(one, routed=(16, 2, 2), elements=40)
    assert block.sent(layout) == pytest.approx(20 * 2 * 15 / 16)
