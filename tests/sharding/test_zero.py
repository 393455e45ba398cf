"""Dimension of a weight along which its optimizer state is cut, and the devices of the parts."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
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
        # Else the dimension that most devices divide; a vector of five goes nowhere.
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
def test_shard_dim_of_shapes(layout, spec, shape, expected):
    assert sizes(layout, spec, shape) == expected


def test_parts_name_the_atoms():
    mesh = fold_abstract(Layout.parse("dp2 tp2 / ep2"))
    dense, expert = P(mesh.pp, None, mesh.tp), P(mesh.pp, mesh.ep, None, mesh.etp)
    assert zero.shard_spec(dense, (3, 8, 6), mesh) == P(mesh.pp, mesh.dp, mesh.tp)
    assert zero.shard_spec(expert, (3, 4, 8, 6), mesh) == P(mesh.pp, mesh.ep, mesh.edp, mesh.etp)
    # Inside a sequence-parallel group first, then across.
    assert zero.shard_spec(P(), (8, 3), mesh) == P((*mesh.tp, *mesh.dp), None)
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
    assert zero.shard_dim(P(), (16, 12), mesh) == zero.ShardDim(-2, (mesh.dp,))
    assert zero.shard_dim(P(), (16, 12), mesh, first=1) == zero.ShardDim(-1, (mesh.dp,))
    assert zero.shard_spec(P(), (16, 12), mesh, first=1) == P(None, mesh.dp)
    assert zero.shard_dim(P(), (16, 7), mesh, first=1).atoms == ()
    assert zero.shard_spec(P(), (16,), mesh, first=1) == P(None)


def collectives(jaxpr):
    """Each collective of a program: its name, over which axes, and the elements it sends of
    ``n`` devices' arrays, ``(n-1)/n`` of the largest."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name.removesuffix("_invariant")
        if name in ("reduce_scatter", "all_gather"):
            sizes = [v.aval.size for v in (*equation.invars, *equation.outvars)]
            yield name, tuple(equation.params["axis_name"]), max(sizes) - min(sizes)
        for inner in jaxprs_in_params(equation.params):
            yield from collectives(inner)


@pytest.mark.parametrize(
    ("layout", "spec", "inside", "across"),
    [
        # Of attention where tp does not split it, then split by tp; of an expert's matrix.
        ("dp4 cp2 tp2 / ep4", (None, None), ("cp", "tp"), ("dp",)),
        ("dp4 cp2 tp2 / ep4", (None, "tp"), ("cp",), ("dp",)),
        ("dp4 cp4 / ep2", ("ep", None), ("cp",), ("dp",)),
        ("cp4 tp2", (None, None), ("cp", "tp"), ()),
        ("dp8", (None, None), (), ("dp",)),
    ],
)
def test_a_stage_inside_and_a_stage_across(layout, spec, inside, across):
    """Over which devices each collective goes, what it sends, and the result."""
    mesh, shape = fold_abstract(Layout.parse(layout)), (48, 16)
    place = P(*(getattr(mesh, axis) if axis else None for axis in spec))
    dim = zero.shard_dim(place, shape, mesh, first=int("ep" in spec))

    def local(gradient):
        gradient = vary(gradient, mesh.axes)
        shard = zero.reduce_scatter(mesh, place, dim, gradient)
        return zero.unshard(vary(shard, mesh.axes), dim)

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=place, out_specs=P(mesh.axes))
    actual = list(collectives(jax.make_jaxpr(step)(jnp.zeros(shape)).jaxpr))
    free = set(zero.replica_axes(place, mesh))
    stages = [
        {atom for axis in stage for atom in getattr(mesh, axis) if mesh.size((atom,)) > 1} & free
        for stage in (inside, across)
    ]
    stages = [stage for stage in stages if stage]
    scatters = [set(axes) for name, axes, _ in actual if name == "reduce_scatter"]
    gathers = [set(axes) for name, axes, _ in actual if name == "all_gather"]
    assert scatters == stages and gathers == stages[::-1]
    # Of what a device holds, n - 1 of n parts inside and of the rest as much across.
    held = mesh.size(mesh.axes) // mesh.size(zero.replica_axes(place, mesh))
    left, expected = math.prod(shape) // held, []
    for stage in stages:
        part = left // mesh.size(tuple(stage))
        expected.append(left - part)
        left = part
    assert [sent for *_, sent in actual] == expected + expected[::-1]


def sums_sent(jaxpr):
    """Each sum over devices of a program: its name, over which axes, and of which dtype."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("reduce_scatter", "all_to_all"):
            yield name, set(equation.params["axis_name"]), equation.invars[0].aval.dtype.name
        for inner in jaxprs_in_params(equation.params):
            yield from sums_sent(inner)


@pytest.mark.parametrize("of_shards", [False, True])
@pytest.mark.parametrize(
    ("layout", "spec", "stages"),
    [
        ("dp8", (None, None), ["across"]),
        ("dp4 cp2 tp2 / ep4", (None, "tp"), ["inside", "across"]),
        ("pp2 dp4 tp2", (None, None), ["inside", "across"]),
        # An expert's, over edp.
        ("dp8 / ep2", ("ep", None), ["across"]),
        ("dp4 cp4 / ep2", ("ep", None), ["inside", "across"]),
        ("cp4 tp2", (None, None), ["inside"]),
    ],
)
def test_gradients_are_compressed_across_and_not_inside(layout, spec, stages, of_shards):
    mesh, shape = fold_abstract(Layout.parse(layout)), (48, 16)
    place = P(*(getattr(mesh, axis) if axis else None for axis in spec))
    dim = zero.shard_dim(place, shape, mesh, int("ep" in spec), comm_dtype="bfloat16")

    def local(gradient):
        gradient = vary(gradient, mesh.axes)
        if not of_shards:
            return zero.reduce_scatter(mesh, place, dim, gradient)
        # The transpose of a gather that is linear.
        like = jax.eval_shape(lambda x: zero.reduce_scatter(mesh, place, dim, x), gradient)
        own = vary(jnp.zeros(like.shape, like.dtype), mesh.axes)
        return jax.vjp(lambda own: zero.unshard(own, dim), own)[1](gradient)[0]

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=place, out_specs=P(mesh.axes))
    actual = list(sums_sent(jax.make_jaxpr(step)(jnp.zeros(shape)).jaxpr))
    free = set(zero.replica_axes(place, mesh))
    free -= {atom for atom in free if mesh.size((atom,)) == 1}
    expected = {
        "inside": ("reduce_scatter", free & set(mesh.sequence), "float32"),
        "across": ("all_to_all", free - set(mesh.sequence), "bfloat16"),
    }
    assert actual == [expected[stage] for stage in stages]


@pytest.mark.parametrize("layout", ["dp8", "dp2 cp2 tp2 / ep4"])
def test_compressed_gradients_error_is_across_groups(layout):
    """The bound is of the float32 sums of groups, and the default is a reduce-scatter's bits."""
    mesh, shape = fold(Layout.parse(layout), jax.devices()[:8]), (16, 3)
    own = np.random.default_rng(5).normal(size=(8, *shape)).astype(np.float32)

    def summed(**options):
        dim = zero.shard_dim(P(), shape, mesh, **options)
        local = jax.shard_map(
            lambda own: zero.reduce_scatter(mesh, P(), dim, own[0]),
            mesh=mesh.mesh,
            in_specs=P(mesh.axes),
            out_specs=zero.shard_spec(P(), shape, mesh),
        )
        return np.asarray(jax.jit(local)(own))

    plain, compressed = summed(), summed(comm_dtype="bfloat16")
    np.testing.assert_array_equal(summed(comm_dtype="float32"), plain)
    # Groups are neighbours: dp changes slowest.
    of_groups = own.reshape(mesh.layout.dp, -1, *shape).sum(axis=1)
    error = np.abs(compressed - plain)
    assert np.max(error) > 0 and np.all(error <= 2.0**-8 * np.abs(of_groups).sum(axis=0))


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
    inputs = P(others, None, None, mesh.tp)
    loss, gradient = jax.jit(
        jax.shard_map(local, mesh=mesh.mesh, in_specs=(parts, inputs), out_specs=(P(), parts))
    )(weight, factors)
    np.testing.assert_allclose(loss, np.sum(weight * factors.sum(axis=0)), rtol=1e-5)
    # Four float32 numbers in another order.
    np.testing.assert_allclose(gradient, factors.sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_gradients_of_shards_in_bfloat16_are_summed_in_float32(wire):
    """Gathered as they are, and sent in bfloat16 without loss. Of 1 and seven times 2^-9 a sum in
    bfloat16 would keep the 1 alone; a CPU sums in float32 whatever it is told, so the program is
    looked at too."""
    mesh = fold(Layout(dp=8), jax.devices()[:8])
    dim = zero.shard_dim(P(), (16,), mesh, comm_dtype=wire)

    def local(shard, factor):
        def loss(shard):
            full = zero.unshard(shard, dim)
            assert full.shape == (16,) and full.dtype == jnp.bfloat16
            return jnp.sum(full * factor[0])

        return jax.grad(loss)(vary(shard, mesh.dp))

    inputs = zero.shard_spec(P(), (16,), mesh)
    factors = np.full((8, 16), 2.0**-9).astype(jnp.bfloat16)
    factors[3] = 1
    weight = np.ones(16, jnp.bfloat16)
    replicated = P((*mesh.dp,))
    program = jax.jit(
        jax.shard_map(local, mesh=mesh.mesh, in_specs=(inputs, replicated), out_specs=inputs)
    )
    result = program(weight, factors)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result.astype(jnp.float32), 1 + 2.0**-6)
    text = program.lower(weight, factors).as_text()
    sent = {
        "float32": r"stablehlo.reduce_scatter.*?\(tensor<16xf32>\) -> tensor<2xf32>",
        "bfloat16": r"stablehlo.all_to_all.*?\(tensor<8x2xbf16>\) -> tensor<8x2xbf16>",
    }
    assert re.search(sent[wire], text, re.S)
