"""Gradients sent in bfloat16: the bound on their error, and less of it than a ring has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from sharding.compression import compressed_reduce_scatter
from sharding.folding import Layout, fold, fold_abstract

MESH = fold(Layout.parse("dp2 cp2 tp2"), jax.devices()[:8])
SHAPE = (3, 16, 5)


def of_all(function):
    """`function` of each device's term, and the shards of dimension 1 laid end to end."""
    local = jax.shard_map(
        lambda terms: function(terms[0], MESH.axes, 1),
        mesh=MESH.mesh,
        in_specs=P(MESH.axes),
        out_specs=P(None, MESH.axes),
    )
    return jax.jit(local)


compressed = of_all(compressed_reduce_scatter)
plain = of_all(lambda x, axes, dim: lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True))


def mixed_magnitudes(seed):
    draw = np.random.default_rng(seed)
    scales = 2.0 ** draw.integers(-40, 40, size=(8, *SHAPE))
    return (draw.normal(size=(8, *SHAPE)) * scales).astype(np.float32)


def cancelling(seed):
    """Terms of which little is left."""
    terms = np.random.default_rng(seed).normal(size=(8, *SHAPE))
    terms[7] = 1e-3 * terms[7] - terms[:7].sum(axis=0)
    return terms.astype(np.float32)


def halfway(_):
    """Each as far from bfloat16 as a number can be."""
    return np.full((8, *SHAPE), 1 + 2.0**-8, np.float32)


@pytest.mark.parametrize("terms_of", [mixed_magnitudes, cancelling, halfway])
def test_compressed_sum_error_bound(terms_of):
    for seed in range(8):
        terms = terms_of(seed)
        wide = terms.astype(np.float64)
        error = np.abs(np.asarray(compressed(terms), np.float64) - wide.sum(axis=0))
        # The rounding of the float32 sums is within it.
        assert np.all(error <= 2.0**-8 * np.abs(wide).sum(axis=0))
        # Nothing is wasted: the bound is used, all but a few bits of it.
        assert np.max(error / np.abs(wide).sum(axis=0)) > 2.0**-11


def test_compressed_sum_rounds_once_in_device_order():
    terms = mixed_magnitudes(11)
    expected = np.zeros(SHAPE, np.float32)
    for term in terms.astype(jnp.bfloat16):
        expected = expected + term.astype(np.float32)
    actual = compressed(terms)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(compressed(terms), actual)


def test_compressed_sum_of_bfloat16_values_is_exact():
    terms = np.random.default_rng(0).integers(-255, 255, size=(8, *SHAPE)).astype(np.float32)
    np.testing.assert_array_equal(compressed(terms), plain(terms))


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_compressed_sum_beats_a_bfloat16_ring(mean):
    terms = (mean + np.random.default_rng(2).normal(size=(8, *SHAPE))).astype(np.float32)
    exact = terms.astype(np.float64).sum(axis=0)
    running = np.zeros(SHAPE, jnp.bfloat16)
    for term in terms.astype(jnp.bfloat16):
        running = (running.astype(np.float32) + term.astype(np.float32)).astype(jnp.bfloat16)

    def rms(found):
        return np.sqrt(np.mean((np.asarray(found, np.float64) - exact) ** 2))

    # Of n terms of equal size the ring rounds n of one and partial sums besides, whose squares add
    # up to n^2 / 2 and more: at n = 8 more than twice the error.
    assert 0 < rms(compressed(terms)) < 0.5 * rms(running)


def test_compressed_sum_keeps_nonfinite_values():
    terms = np.ones((8, *SHAPE), np.float32)
    terms[5, 0, 0, 0], terms[2, 1, 3, 4] = np.nan, np.inf
    result = np.asarray(compressed(terms))
    assert np.isnan(result[0, 0, 0]) and np.isposinf(result[1, 3, 4])
    assert np.isfinite(result).sum() == result.size - 2


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_compressed_sum_sends_half_the_bytes():
    sent = {}
    for name, function in (("all_to_all", compressed), ("reduce_scatter", plain)):
        program = equations(jax.make_jaxpr(function)(mixed_magnitudes(0)).jaxpr)
        (of,) = [e for e in program if e.primitive.name in ("all_to_all", "reduce_scatter")]
        assert of.primitive.name == name
        # Both send all but one of eight parts of what they are given.
        sent[name] = of.invars[0].aval.dtype.itemsize * of.invars[0].aval.size * 7 // 8
    assert sent["reduce_scatter"] == 4 * 3 * 16 * 5 * 7 // 8 == 2 * sent["all_to_all"]


def test_compressed_sum_program_size_is_bounded():
    """Beyond eight additions the rest is a loop."""
    mesh = fold_abstract(Layout.parse("dp64"))
    local = jax.shard_map(
        lambda x: compressed_reduce_scatter(x[0], mesh.dp, 0),
        mesh=mesh.mesh,
        in_specs=P(mesh.dp),
        out_specs=P(mesh.dp),
    )
    names = [e.primitive.name for e in equations(jax.make_jaxpr(local)(jnp.ones((64, 64))).jaxpr)]
    assert "scan" in names and names.count("add") < 20
