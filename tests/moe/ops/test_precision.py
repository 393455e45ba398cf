"""Norms against numpy, and in half precision."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from programs import jit

from moe.ops.precision import rms_norm, shared

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 3, 5, 6, 2, 4, 7
norm = jit(rms_norm, static_argnums=2)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def oracle_norm(row, scale, epsilon):
    row = np.asarray(row, np.float64)
    return row / np.sqrt(np.mean(row**2) + epsilon) * scale


def test_rms_norm():
    x, scale = normal(0, 3, D_MODEL), normal(1, D_MODEL)
    out = np.asarray(norm(x, scale, 0.5))
    for row in range(3):
        np.testing.assert_allclose(out[row], oracle_norm(x[row], scale, 0.5), rtol=2e-6, atol=1e-7)


def test_rms_norm_of_half_precision_is_taken_in_float32():
    x, scale = (300 * normal(0, 3, D_MODEL)).astype(jnp.bfloat16), normal(1, D_MODEL)
    out = norm(x, scale, 1e-6)
    assert out.dtype == jnp.bfloat16
    wide = np.asarray(norm(x.astype(np.float32), scale, 1e-6))
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    assert np.all(np.isfinite(norm(np.zeros((3, D_MODEL), np.float32), scale, 1e-6)))


def test_gradients_of_half_precision_weights_are_added_up_before_they_are_rounded():
    draw = np.random.default_rng(3)
    given = np.ones((4, 5), jnp.bfloat16), np.ones(7, jnp.bfloat16)
    parts = tuple(
        tuple(draw.normal(size=x.shape).astype(jnp.bfloat16) for x in given) for _ in range(12)
    )

    @jit
    def with_gradients(parts, *given):
        copies, pull = jax.vjp(lambda *weights: shared(weights, 12), *given)
        return copies, pull(parts)

    copies, gradients = with_gradients(parts, *given)
    chex.assert_trees_all_equal(copies, (given,) * 12)
    for found, *of_chunks in zip(gradients, *parts, strict=True):
        exact = np.sum([np.asarray(x, np.float32) for x in of_chunks], axis=0)
        np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))
        assert np.any(np.asarray(found) != np.asarray(sum(of_chunks[1:], of_chunks[0])))
