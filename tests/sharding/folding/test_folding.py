"""Layouts: what is refused and what is proposed instead, and which ranks form each group."""

import itertools
import math
import re

import jax
import pytest

from sharding.folding import ATTENTION, EXPERT, Layout, fold, fold_abstract
from sharding.folding.groups import axis_groups

LOGICAL = ("pp", *ATTENTION, *EXPERT)


def megatron_groups(layout: Layout, order: tuple[str, ...], axis: str) -> list[list[int]]:
    """The groups of `axis` when ranks count through `order`, slowest first, by plain counting."""
    sizes = [getattr(layout, name) for name in order]
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*map(range, sizes))):
        rest = tuple(p for name, p in zip(order, place, strict=True) if name != axis)
        members.setdefault(rest, []).append(rank)
    return sorted(members.values())


def all_layouts():
    """Every layout of these many ranks a stage, some with two stages."""
    for stage in (1, 2, 3, 4, 6, 8, 12, 16, 36):
        divisors = [n for n in range(1, stage + 1) if stage % n == 0]
        thirds = [(a, b) for a in divisors for b in divisors if stage % (a * b) == 0]
        for (tp, cp), (etp, ep) in itertools.product(thirds, thirds):
            pp = 1 + (tp + ep) % 2
            yield Layout(tp=tp, cp=cp, dp=stage // (tp * cp), pp=pp, ep=ep, etp=etp)


def has_refinement(layout: Layout) -> bool:
    """True if one mixed-radix count of the ranks serves both sides."""
    strides = {1, layout.tp, layout.tp * layout.cp, layout.tp * layout.cp * layout.dp}
    strides |= {layout.etp, layout.etp * layout.ep}
    return all(b % a == 0 or a % b == 0 for a, b in itertools.combinations(strides, 2))


def test_worked_example_of_sixteen_ranks():
    mesh = fold_abstract(Layout(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1))
    pairs = [[n, n + 4] for n in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert axis_groups(mesh, mesh.tp) == [[n, n + 1] for n in range(0, 16, 2)]
    assert axis_groups(mesh, mesh.cp) == [[n, n + 2] for n in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert axis_groups(mesh, mesh.dp) == pairs
    assert axis_groups(mesh, mesh.dp + mesh.cp) == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]
    assert axis_groups(mesh, mesh.pp) == [[n, n + 8] for n in range(8)]
    assert axis_groups(mesh, mesh.ep) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert axis_groups(mesh, mesh.edp) == pairs
    assert axis_groups(mesh, mesh.etp) == [[n] for n in range(16)]


def test_worked_example_with_all_experts_in_one_stage():
    mesh = fold_abstract(Layout(tp=2, cp=2, dp=2, pp=2, ep=8))
    assert axis_groups(mesh, mesh.ep) == [list(range(8)), list(range(8, 16))]
    assert axis_groups(mesh, mesh.edp) == [[n] for n in range(16)]


@pytest.mark.slow
def test_every_small_layout_folds():
    """Sizes, ownership of atoms, and Megatron's rank order wherever both sides can have it."""
    refined = paired = 0
    for layout in all_layouts():
        mesh = fold_abstract(layout)
        assert mesh.size(mesh.axes) == layout.num_devices
        for axis in LOGICAL:
            atoms = getattr(mesh, axis)
            assert atoms, f"{layout}: {axis} is missing"
            assert mesh.size(atoms) == getattr(layout, axis), (layout, axis)
        for side in (ATTENTION, EXPERT):
            owned = [atom for axis in ("pp", *side) for atom in getattr(mesh, axis)]
            assert len(owned) == len(set(owned)), f"{layout}: two axes of {side} share an atom"
            left = [mesh.mesh.shape[atom] for atom in set(mesh.axes) - set(owned)]
            assert math.prod(left) == 1, f"{layout}: {side} leaves devices out"
        for axis in ("pp", *ATTENTION):
            expected = megatron_groups(layout, ("pp", *ATTENTION), axis)
            assert axis_groups(mesh, getattr(mesh, axis)) == expected, (layout, axis)
        if not has_refinement(layout):
            paired += 1
            continue
        refined += 1
        for axis in ("pp", *EXPERT):
            expected = megatron_groups(layout, ("pp", *EXPERT), axis)
            assert axis_groups(mesh, getattr(mesh, axis)) == expected, (layout, axis)
    assert refined > 1000
    assert paired > 100


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        # 2 and 3 do not divide each other, so no count of six ranks has both strides.
        ("tp2 dp3 / etp3", {"tp": 2, "dp": 3, "etp": 3, "edp": 2, "ep": 1}),
        ("tp2 dp3 / ep3", {"tp": 2, "dp": 3, "ep": 3, "edp": 2, "etp": 1}),
        ("tp6 cp2 dp3 / ep4 etp9", {"tp": 6, "cp": 2, "dp": 3, "ep": 4, "etp": 9, "edp": 1}),
        ("tp4 dp9 pp5 / etp6 ep3", {"tp": 4, "dp": 9, "pp": 5, "ep": 3, "etp": 6, "edp": 2}),
    ],
)
def test_without_a_refinement_prime_factors_are_paired(text, sizes):
    layout = Layout.parse(text)
    assert not has_refinement(layout)
    mesh = fold_abstract(layout)
    assert {axis: mesh.size(getattr(mesh, axis)) for axis in sizes} == sizes


def test_axes_not_in_use_are_axes_of_size_one():
    mesh = fold_abstract(Layout())
    assert mesh.axes == ("pp", *ATTENTION, *EXPERT)
    assert set(mesh.mesh.shape.values()) == {1}
    assert mesh.except_sequence == ("pp", "dp", "edp", "ep", "etp")


def test_devices_keep_their_order():
    mesh = fold(Layout.parse("tp2 dp8 / ep4"))
    assert isinstance(mesh.mesh, jax.sharding.Mesh)
    assert mesh.mesh.devices.reshape(-1).tolist() == jax.devices()
    assert mesh.axes == fold_abstract(mesh.layout).axes
    assert set(mesh.except_sequence) | set(mesh.sequence) == set(mesh.axes)
    assert not set(mesh.except_sequence) & set(mesh.sequence)


def test_fold_wants_the_devices_of_the_layout():
    with pytest.raises(ValueError, match=r"tp2.* needs 2 devices but 16 were given: change a size"):
        fold(Layout(tp=2))


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "ep", "etp"])
def test_sizes_start_at_one(axis):
    with pytest.raises(ValueError, match=rf"{axis}=0 must be at least 1: use 1"):
        Layout(**{axis: 0})


def proposed(error) -> list[tuple[int, int]]:
    """The sizes of ``ep`` and ``etp`` that a refusal names."""
    assert "\n" not in str(error.value)
    _, _, near = str(error.value).partition(": the nearest legal ")
    return [(int(ep), int(etp)) for ep, etp in re.findall(r"ep=(\d+) etp=(\d+)", near)]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("tp4 cp1 dp2 / ep3 etp2", [(4, 2), (2, 2), (4, 1)]),
        ("tp4 dp2 / ep7", [(8, 1), (4, 1), (2, 1)]),
        ("tp2 dp2 / ep16", [(4, 1), (2, 1), (1, 1)]),
        ("dp5 / ep2", [(1, 1), (5, 1), (1, 5)]),
        ("dp5 / ep4", [(5, 1), (1, 1), (1, 5)]),
        ("tp3 dp2 / etp4", [(1, 3), (1, 6), (1, 2)]),
        ("tp2 dp3 / ep5 etp2", [(3, 2), (6, 1), (3, 1)]),
        ("dp1 / ep2", [(1, 1)]),
    ],
)
def test_nearest_legal_layouts_are_named(text, nearest):
    with pytest.raises(ValueError, match=r"does not divide tp x cp x dp = \d+") as error:
        Layout.parse(text)
    assert proposed(error) == nearest


def test_every_proposed_layout_is_legal():
    for tp, dp, ep, etp in itertools.product((1, 2, 3, 4, 6), (1, 2, 5), range(1, 9), range(1, 5)):
        if tp * dp % (ep * etp) == 0:
            assert Layout(tp=tp, dp=dp, ep=ep, etp=etp).edp * ep * etp == tp * dp
            continue
        with pytest.raises(ValueError, match="does not divide") as error:
            Layout(tp=tp, dp=dp, ep=ep, etp=etp)
        near = proposed(error)
        assert len(near) == len(set(near)) == min(3, len(legal_experts(tp * dp)))
        assert set(near) <= legal_experts(tp * dp)


def legal_experts(stage: int) -> set[tuple[int, int]]:
    sizes = range(1, stage + 1)
    return {(ep, etp) for ep in sizes for etp in sizes if stage % (ep * etp) == 0}


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("", Layout()),
        ("dp8", Layout(dp=8)),
        ("tp2 dp2 / ep4", Layout(tp=2, dp=2, ep=4)),
        ("pp3 tp2 cp2 dp10 / etp4 ep5", Layout(tp=2, cp=2, dp=10, pp=3, ep=5, etp=4)),
        ("tp2 dp4 / ep4 edp2", Layout(tp=2, dp=4, ep=4)),
        ("pp2 vpp3 dp2", Layout(dp=2, pp=2, vpp=3)),
    ],
)
def test_parse(text, layout):
    assert Layout.parse(text) == layout
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tp2 xp2",
            r"layout 'tp2 xp2': 'xp2' is not an axis and a size; .*tp, cp, dp, pp, ep, etp",
        ),
        ("tp", r"'tp' is not an axis and a size"),
        ("tp-2", r"'tp-2' is not an axis and a size"),
        ("2tp", r"'2tp' is not an axis and a size"),
        ("tp2 / tp4", r"names the axis tp twice"),
        ("dp0", r"dp=0 must be at least 1"),
        (
            "dp2 vpp2",
            r"vpp=2 \(interleaved pipeline chunks\) needs pp of at least 2, not pp=1: set pp",
        ),
        ("tp2 dp4 / ep4 edp4", r"edp4.* leave edp=2"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)
