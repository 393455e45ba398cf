"""Gates with the weight of each row against their formulas, and gradients against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit

from moe.architecture.feed_forward import ClampedSwiGLU
from moe.experts.gated import apply_gate

ROWS, D_EXPERT = 9, 5


def given(dtype=np.float32):
    draw = np.random.default_rng(0)
    inward = 3 * draw.normal(size=(ROWS, 2 * D_EXPERT))
    return inward.astype(dtype), draw.random(ROWS).astype(np.float32)


def with_gradients(function):
    """What it gives, and its gradients under an uneven pull."""
    pull = np.random.default_rng(1).normal(size=(ROWS, D_EXPERT)).astype(np.float32)

    @jit
    def both(pull, *given):
        out, back = jax.vjp(function, *given)
        return out, back(pull)

    return both(pull, *given())


def written_out(inward, probs):
    gate, up = inward[:, :D_EXPERT], inward[:, D_EXPERT:]
    return gate / (1 + jnp.exp(-gate)) * up * probs[:, None]


def test_values_and_gradients():
    (out, found), (expected, by_autodiff) = map(with_gradients, (apply_gate, written_out))
    # A few operations in float32, on numbers of order ten.
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(found, by_autodiff, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


def clamped(gate, up):
    gate, up = jnp.where(gate > 2, 2, gate), jnp.where(abs(up) > 2, 2 * jnp.sign(up), up)
    return (up + 1) * gate / (1 + jnp.exp(-1.5 * gate))


def geglu(gate, up):
    inner = (2 / jnp.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * (1 + jnp.tanh(inner)) / 2 * up


@pytest.mark.parametrize(
    ("activation", "formula"), [(ClampedSwiGLU(1.5, 2.0), clamped), ("gelu_tanh", geglu)]
)
def test_other_gates(activation, formula):
    def expected(inward, probs):
        return formula(inward[:, :D_EXPERT], inward[:, D_EXPERT:]) * probs[:, None]

    (out, found), (wanted, by_autodiff) = map(
        with_gradients, (lambda *x: apply_gate(*x, activation), expected)
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=2e-6)
    for a, b in zip(found, by_autodiff, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    if activation != "gelu_tanh":
        # Some gates and ups are cut, above and below.
        inward, _ = given()
        assert (inward > 2).any() and (inward[:, D_EXPERT:] < -2).any()


def test_a_limit_is_above_zero():
    with pytest.raises(ValueError, match=r"limit=0\.0 must be above 0"):
        ClampedSwiGLU(1.5, 0.0)


def test_half_precision_is_rounded_once():
    inward, probs = given(jnp.bfloat16)
    out = np.asarray(jit(apply_gate)(inward, probs))
    assert out.dtype == jnp.bfloat16
    exact = written_out(np.asarray(inward, np.float64), np.asarray(probs, np.float64))
    np.testing.assert_allclose(out.astype(np.float32), exact, rtol=2**-8, atol=1e-30)
