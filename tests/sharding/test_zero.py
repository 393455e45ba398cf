"""Which dimension of a weight its optimiser state is cut along, and over which devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import zero
from sharding.folding import Layout, fold, fold_abstract


def sizes(layout, spec, shape):
    """The dimension, and over how many devices it is cut."""
    mesh = fold_abstract(Layout.parse(layout))
    place = P(*(getattr(mesh, axis) if axis else None for axis in spec))
    axis, atoms = zero.split(place, shape, mesh)
    return axis, mesh.size(atoms)


@pytest.mark.parametrize(
    ("layout", "spec", "shape", "expected"),
    [
        # Everything that is whole: the first dimension that all devices divide.
        ("dp8", (None, None), (24, 16), (0, 8)),
        ("dp8", (None, None), (20, 16), (1, 8)),
        # Where none does, the one that goes furthest; a vector of five goes nowhere.
        ("dp2 cp4 / ep4", (None, None), (6, 12), (1, 4)),
        ("dp2 cp2 tp2 / ep8", (None, None), (6, 12), (1, 4)),
        ("dp8", (None,), (5,), (0, 1)),
        # Attention's weights over dp x cp, what tp does not split over tp too.
        ("dp2 cp2 tp2 / ep8", ("pp", None, "tp", None), (3, 16, 4, 8), (1, 4)),
        ("dp2 cp2 tp2 / ep8", ("pp", None, None), (3, 16, 12), (1, 8)),
        # Experts over edp.
        ("dp4 tp2 / ep4 etp1", ("pp", "ep", None, "etp"), (2, 8, 6, 4), (2, 2)),
        ("dp4 tp2 / ep2 etp1", ("pp", "ep", None, "etp"), (2, 8, 12, 4), (2, 4)),
        ("dp4 tp2 / ep4 etp2", ("pp", "ep", None, "etp"), (2, 8, 6, 4), (0, 1)),
        # The ends of a pipeline are on all its stages.
        ("pp4 dp2", (None, None), (11, 16), (1, 8)),
        ("dp1", (None, None), (16, 16), (0, 1)),
    ],
)
def test_the_cut(layout, spec, shape, expected):
    assert sizes(layout, spec, shape) == expected


def test_parts_name_the_atoms():
    mesh = fold_abstract(Layout.parse("dp2 tp2 / ep2"))
    dense, expert = P(mesh.pp, None, mesh.tp), P(mesh.pp, mesh.ep, None, mesh.etp)
    assert zero.parts(dense, (3, 8, 6), mesh) == P(mesh.pp, mesh.dp, mesh.tp)
    assert zero.parts(expert, (3, 4, 8, 6), mesh) == P(mesh.pp, mesh.ep, mesh.edp, mesh.etp)
    assert zero.parts(P(), (8, 3), mesh) == P((*mesh.dp, *mesh.tp), None)
    assert zero.parts(dense, (3, 7, 6), mesh) == dense


@pytest.mark.parametrize("shape", [(16, 3), (3, 12), (3, 5)])
def test_parts_of_the_sum(shape):
    """All of it cut, half of the devices, nothing."""
    layout = Layout.parse("dp2 cp2 tp2 / ep4")
    mesh = fold(layout, jax.devices()[: layout.num_devices])
    own = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    parts = zero.parts(P(), shape, mesh)
    local = jax.shard_map(
        lambda own: zero.sum_to_parts(own[0], P(), mesh),
        mesh=mesh.mesh,
        in_specs=P(mesh.axes),
        out_specs=parts,
    )
    out = jax.jit(local)(own)
    assert out.addressable_shards[0].data.size * {16: 8, 12: 4, 5: 1}[max(shape)] == out.size
    # Eight float32 numbers in another order.
    np.testing.assert_allclose(out, own.sum(axis=0), rtol=1e-5, atol=1e-6)
