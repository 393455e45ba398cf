"""Each collective against plain numpy over the groups of ranks, values and gradients.

Two axes are tuples of two atoms. The integers that travel are exact in float32, so equality is too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiers import full_but

from sharding.collectives import (
    all_sum,
    all_to_all,
    gather_and_widen,
    gather_tokens,
    join_shards,
    local_shard,
    scatter_and_round,
    scatter_tokens,
    vary,
    varying,
)
from sharding.folding import Layout, fold

MESH = fold(Layout.parse("tp2 dp4 / ep4"), jax.devices()[:8])
# Ranks are 2 dp + tp and 4 edp + ep.
GROUPS = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "dp": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "axes": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "etp": [[rank] for rank in range(8)],
}
AXES = list(GROUPS)
# One of attention and one of experts.
QUICK = ("tp", "ep")
WIDTH = 3


def numbers(seed, *shape):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


def each_device(function, axes, *, reduced=False):
    """`function` of the array of each device, ``[device, ...] -> [device, ...]``.

    Args:
      reduced: the result is typed as equal along `axes`; one copy per group is returned.
    """
    rest = tuple(axis for axis in MESH.axes if axis not in axes)
    return jax.shard_map(
        lambda x: function(x[0], axes)[None],
        mesh=MESH.mesh,
        in_specs=P(MESH.axes),
        out_specs=P(rest if reduced else MESH.axes),
    )


def value_and_gradient(function, x, cotangent):
    """The value, and the gradient of its inner product with `cotangent`."""

    def inner(x):
        out = function(x)
        return jnp.sum(out * cotangent), out

    gradient, out = jax.jit(jax.grad(inner, has_aux=True))(x)
    return np.asarray(out), np.asarray(gradient)


def expect_each(name, x, rule):
    """``[device, ...]``; ``rule(rows of the group, place in it)`` says what each device gets."""
    out: dict[int, np.ndarray] = {}
    for group in GROUPS[name]:
        for place, rank in enumerate(group):
            out[rank] = rule(x[group], place)
    return np.stack([out[rank] for rank in range(8)])


def test_ranks_equal_the_oracle():
    index = jax.jit(
        jax.shard_map(
            lambda: jnp.stack([jax.lax.axis_index(getattr(MESH, name)) for name in AXES])[None],
            mesh=MESH.mesh,
            in_specs=(),
            out_specs=P(MESH.axes),
        )
    )()
    for name, places in zip(AXES, np.asarray(index).T, strict=True):
        expected = expect_each(name, np.arange(8), lambda rows, place: np.asarray(place))
        np.testing.assert_array_equal(places, expected)
    assert len(MESH.dp) == len(MESH.ep) == 2


@pytest.mark.parametrize(
    ("gather", "scatter"),
    [
        (gather_tokens, scatter_tokens),
        (gather_and_widen, partial(scatter_and_round, dtype=jnp.float32)),
    ],
)
@pytest.mark.parametrize("name", full_but(AXES, *QUICK))
def test_gather_and_scatter_are_each_others_transpose(name, gather, scatter):
    axes, n = getattr(MESH, name), len(GROUPS[name][0])
    shards, full = numbers(1, 8, 2, WIDTH), numbers(2, 8, 2 * n, WIDTH)

    def gathered(rows, place):
        return rows.reshape(-1, WIDTH)

    def scattered(rows, place):
        return rows.sum(axis=0)[2 * place : 2 * place + 2]

    out, gradient = value_and_gradient(each_device(gather, axes), shards, full)
    np.testing.assert_array_equal(out, expect_each(name, shards, gathered))
    np.testing.assert_array_equal(gradient, expect_each(name, full, scattered))

    out, gradient = value_and_gradient(each_device(scatter, axes), full, shards)
    np.testing.assert_array_equal(out, expect_each(name, full, scattered))
    np.testing.assert_array_equal(gradient, expect_each(name, shards, gathered))


def test_sums_of_half_precision_are_rounded_once():
    """256 and seven times 1 are 263 and then 264; rounded after each term they stay 256."""
    terms = np.ones((8, 8, WIDTH), np.float32)
    terms[0] = 256
    shard = jnp.zeros((8, 1, WIDTH), jnp.bfloat16)

    @jax.jit
    def sums(terms, shard):
        scatter = each_device(partial(scatter_and_round, dtype=jnp.bfloat16), MESH.axes)
        out, back = jax.vjp(scatter, terms)
        (gathered,) = back(out)
        full, back = jax.vjp(each_device(gather_and_widen, MESH.axes), shard)
        assert full.dtype == jnp.float32
        return out, gathered, back(terms)[0]

    out, gathered, gradient = sums(jnp.asarray(terms), shard)
    assert (out.dtype, gathered.dtype, gradient.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    for total in (out, gathered, gradient):
        np.testing.assert_array_equal(np.asarray(total, np.float32), 264)


@pytest.mark.parametrize("name", AXES)
def test_all_to_all_is_its_own_reverse(name):
    axes, n = getattr(MESH, name), len(GROUPS[name][0])
    x, cotangent = numbers(1, 8, n, 5, WIDTH), numbers(2, 8, n, 5, WIDTH)

    def swapped(rows, place):
        return rows[:, place]

    out, gradient = value_and_gradient(each_device(all_to_all, axes), x, cotangent)
    np.testing.assert_array_equal(out, expect_each(name, x, swapped))
    np.testing.assert_array_equal(gradient, expect_each(name, cotangent, swapped))
    back = expect_each(name, out, swapped)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("name", full_but(AXES, *QUICK))
def test_sums_and_joined_shards_count_once(name):
    """One copy per group is used, so its cotangent is each device's gradient, not n times it."""
    axes, count, n = getattr(MESH, name), len(GROUPS[name]), len(GROUPS[name][0])
    x = numbers(1, 8, 2, WIDTH)
    cotangent = numbers(2, count, 2, WIDTH)
    out, gradient = value_and_gradient(each_device(all_sum, axes, reduced=True), x, cotangent)
    for copy, group in enumerate(GROUPS[name]):
        np.testing.assert_array_equal(out[copy], x[group].sum(axis=0))
        for rank in group:
            np.testing.assert_array_equal(gradient[rank], cotangent[copy])

    cotangent = numbers(3, count, 2 * n, WIDTH)
    out, gradient = value_and_gradient(each_device(join_shards, axes, reduced=True), x, cotangent)
    for copy, group in enumerate(GROUPS[name]):
        np.testing.assert_array_equal(out[copy], x[group].reshape(-1, WIDTH))
        shards = cotangent[copy].reshape(n, 2, WIDTH)
        np.testing.assert_array_equal(gradient[group], shards)


@pytest.mark.parametrize("name", ["tp", "dp", "axes"])
def test_own_shard_and_its_gradient(name):
    axes, count, n = getattr(MESH, name), len(GROUPS[name]), len(GROUPS[name][0])
    rest = tuple(axis for axis in MESH.axes if axis not in axes)
    full, cotangent = numbers(1, count, 2 * n, WIDTH), numbers(2, 8, 2, WIDTH)
    function = jax.shard_map(
        lambda x: local_shard(x[0], axes)[None],
        mesh=MESH.mesh,
        in_specs=P(rest),
        out_specs=P(MESH.axes),
    )
    out, gradient = value_and_gradient(function, full, cotangent)
    for copy, group in enumerate(GROUPS[name]):
        np.testing.assert_array_equal(out[group], full[copy].reshape(n, 2, WIDTH))
        np.testing.assert_array_equal(gradient[copy], cotangent[group].reshape(-1, WIDTH))


def test_collectives_carry_integers():
    x = numbers(1, 8, 2).astype(np.int32)
    joined = jax.jit(each_device(join_shards, MESH.dp, reduced=True))(x)
    assert joined.dtype == jnp.int32
    np.testing.assert_array_equal(
        joined, np.stack([x[group].reshape(-1) for group in GROUPS["dp"]])
    )


def test_vary_changes_the_type_and_sums_the_gradient():
    seen = []

    def local(x, weight):
        cast = vary({"weight": weight}, MESH.axes)["weight"]
        again = vary(cast, MESH.dp)
        seen.append((varying(weight), varying(cast), varying(again)))
        return x * again[None]

    function = jax.shard_map(
        local, mesh=MESH.mesh, in_specs=(P(MESH.axes), P()), out_specs=P(MESH.axes)
    )
    x, cotangent, weight = numbers(1, 8), numbers(2, 8), np.float32(3)
    out, gradient = value_and_gradient(lambda w: function(x, w), weight, cotangent)
    np.testing.assert_array_equal(out, 3 * x)
    np.testing.assert_array_equal(gradient, np.sum(x * cotangent))
    everywhere = frozenset(MESH.axes)
    assert seen[0] == (frozenset(), everywhere, everywhere)


def test_a_loss_differentiated_inside_counts_each_sum_once():
    """``sum_d (sum over the group of x)^2`` per group: the derivative is twice the sum, once."""

    def local(x):
        return jax.grad(lambda x: jnp.sum(jnp.square(all_sum(x, MESH.axes))))(x)

    function = jax.shard_map(local, mesh=MESH.mesh, in_specs=P(MESH.axes), out_specs=P(MESH.axes))
    x = numbers(1, 8)
    np.testing.assert_array_equal(jax.jit(function)(x), np.full(8, 2 * x.sum(), np.float32))
