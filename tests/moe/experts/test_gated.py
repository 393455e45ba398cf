"""SwiGLU with the weight of each row against its formula, and its gradient against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np

from moe.experts.gated import gated

ROWS, D_EXPERT = 9, 5


def given(dtype=jnp.float32):
    draw = np.random.default_rng(0)
    inward = 3 * draw.normal(size=(ROWS, 2 * D_EXPERT))
    return jnp.asarray(inward, dtype), jnp.asarray(draw.random(ROWS), jnp.float32)


def written_out(inward, probs):
    gate, up = inward[:, :D_EXPERT], inward[:, D_EXPERT:]
    return gate / (1 + jnp.exp(-gate)) * up * probs[:, None]


def test_values_and_gradients():
    pull = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, D_EXPERT)), jnp.float32)
    (out, back), (expected, by_autodiff) = (jax.vjp(f, *given()) for f in (gated, written_out))
    # A few operations in float32, on numbers of order ten.
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(back(pull), by_autodiff(pull), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def test_half_precision_is_rounded_once():
    inward, probs = given(jnp.bfloat16)
    out = gated(inward, probs)
    assert out.dtype == jnp.bfloat16
    exact = written_out(np.asarray(inward, np.float64), np.asarray(probs, np.float64))
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=2**-8, atol=1e-30)
