"""Which dimension of a weight its optimizer state is cut along, and over which devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import zero
from sharding.collectives import vary
from sharding.folding import Layout, fold, fold_abstract


def sizes(layout, spec, shape):
    """The dimension, and over how many devices it is cut."""
    mesh = fold_abstract(Layout.parse(layout))
    place = P(*(getattr(mesh, axis) if axis else None for axis in spec))
    dim = zero.shard_dim(place, shape, mesh)
    return dim.dim + len(shape) if dim.atoms else 0, mesh.size(dim.atoms)


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
    assert zero.shard_spec(dense, (3, 8, 6), mesh) == P(mesh.pp, mesh.dp, mesh.tp)
    assert zero.shard_spec(expert, (3, 4, 8, 6), mesh) == P(mesh.pp, mesh.ep, mesh.edp, mesh.etp)
    assert zero.shard_spec(P(), (8, 3), mesh) == P((*mesh.dp, *mesh.tp), None)
    assert zero.shard_spec(dense, (3, 7, 6), mesh) == dense


@pytest.mark.parametrize("shape", [(16, 3), (3, 12), (3, 5)])
def test_parts_of_the_sum(shape):
    """All of it cut, half of the devices, nothing."""
    layout = Layout.parse("dp2 cp2 tp2 / ep4")
    mesh = fold(layout, jax.devices()[: layout.num_devices])
    own = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    parts, dim = zero.shard_spec(P(), shape, mesh), zero.shard_dim(P(), shape, mesh)
    local = jax.shard_map(
        lambda own: zero.reduce_scatter(mesh, P(), dim, own[0]),
        mesh=mesh.mesh,
        in_specs=P(mesh.axes),
        out_specs=parts,
    )
    out = jax.jit(local)(own)
    assert out.addressable_shards[0].data.size * {16: 8, 12: 4, 5: 1}[max(shape)] == out.size
    # Eight float32 numbers in another order.
    np.testing.assert_allclose(out, own.sum(axis=0), rtol=1e-5, atol=1e-6)


def test_a_stack_is_not_cut_across():
    mesh = fold_abstract(Layout.parse("dp4"))
    assert zero.shard_dim(P(), (16, 12), mesh) == zero.ShardDim(-2, mesh.dp)
    assert zero.shard_dim(P(), (16, 12), mesh, first=1) == zero.ShardDim(-1, mesh.dp)
    assert zero.shard_spec(P(), (16, 12), mesh, first=1) == P(None, mesh.dp)
    assert zero.shard_dim(P(), (16, 7), mesh, first=1).atoms == ()
    assert zero.shard_spec(P(), (16,), mesh, first=1) == P(None)


def test_joined_parts_are_the_whole_and_their_gradients_are_summed():
    layout = Layout.parse("dp2 cp2 tp2 / ep4")
    mesh = fold(layout, jax.devices()[: layout.num_devices])
    shape, spec = (3, 8, 6), P(None, None, mesh.tp)
    dim = zero.shard_dim(spec, shape, mesh, first=1)
    draw = np.random.default_rng(0)
    weight, factors = draw.normal(size=shape), draw.normal(size=(4, *shape))
    weight, factors = weight.astype(np.float32), factors.astype(np.float32)

    def local(part, factor):
        def loss(part):
            joined = zero.unshard({"weight": part}, {"weight": dim})["weight"]
            assert joined.shape == (3, 8, 3)
            return jnp.sum(joined * factor[0])

        part = vary(part, mesh.axes)
        loss_here, gradient = jax.value_and_grad(loss)(part)
        summed = zero.reduce_scatter(mesh, spec, dim, gradient, is_sharded=True)
        return jax.lax.psum(loss_here, mesh.axes), summed

    parts = zero.shard_spec(spec, shape, mesh, first=1)
    # Each device weighs its columns by numbers of its own.
    others = tuple(atom for atom in mesh.axes if atom not in mesh.tp)
    given = P(others, None, None, mesh.tp)
    loss, gradient = jax.jit(
        jax.shard_map(local, mesh=mesh.mesh, in_specs=(parts, given), out_specs=(P(), parts))
    )(weight, factors)
    np.testing.assert_allclose(loss, np.sum(weight * factors.sum(axis=0)), rtol=1e-5)
    # Four float32 numbers in another order.
    np.testing.assert_allclose(gradient, factors.sum(axis=0), rtol=1e-5, atol=1e-6)


def test_gradients_of_shards_in_bfloat16_are_summed_in_float32():
    """Gathered as they are. Of 1 and seven times 2^-9 a sum in bfloat16 would keep the 1 alone; a
    CPU sums in float32 whatever it is told, so the program is looked at too."""
    mesh = fold(Layout(dp=8), jax.devices()[:8])
    dim = zero.shard_dim(P(), (16,), mesh)

    def local(shard, factor):
        def loss(shard):
            whole = zero.unshard(shard, dim)
            assert whole.shape == (16,) and whole.dtype == jnp.bfloat16
            return jnp.sum(whole * factor[0])

        return jax.grad(loss)(vary(shard, mesh.dp))

    given = zero.shard_spec(P(), (16,), mesh)
    factors = np.full((8, 16), 2.0**-9).astype(jnp.bfloat16)
    factors[3] = 1
    weight = np.ones(16, jnp.bfloat16)
    replicated = P((*mesh.dp,))
    program = jax.jit(
        jax.shard_map(local, mesh=mesh.mesh, in_specs=(given, replicated), out_specs=given)
    )
    found = program(weight, factors)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), 1 + 2.0**-6)
    text = program.lower(weight, factors).as_text()
    assert re.search(r"stablehlo.reduce_scatter.*?\(tensor<16xf32>\) -> tensor<2xf32>", text, re.S)
