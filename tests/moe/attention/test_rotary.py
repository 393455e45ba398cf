"""Rotary positions against complex numbers that turn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import jit

from moe.architecture.rope import LlamaScaling, YarnScaling
from moe.attention.rotary import rope

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, D_MODEL = 3, 5, 6, 2, 4, 7
turn = jit(rope, static_argnums=2)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def oracle_rope(x, position, base):
    """Each pair of the head as a complex number, turned."""
    x = np.asarray(x, np.float64)
    half = len(x) // 2
    pairs = x[:half] + 1j * x[half:]
    turned = pairs * np.exp(1j * position * base ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])


def test_rope_turns_pairs():
    x, positions = normal(0, 6, 2, HEAD_DIM), np.array([0, 1, 2, 7, 7, 30])
    out = np.asarray(turn(x, positions, 100.0))
    np.testing.assert_array_equal(out[0], x[0])
    for token, position in enumerate(positions):
        for head in range(2):
            expected = oracle_rope(x[token, head], position, 100.0)
            # Angles up to 30 radians in float32: 2e-6.
            np.testing.assert_allclose(out[token, head], expected, atol=1e-5)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200), st.integers(0, 99))
def test_rope_products_depend_on_the_distance_alone(first, second, shift, seed):
    query, key = (normal(seed + n, 1, 1, 6) for n in (0, 100))

    def turned(x, position):
        return np.asarray(turn(x, np.asarray([position]), 50.0))

    def product(q_position, k_position):
        return np.sum(turned(query, q_position) * turned(key, k_position))

    # Positions up to 400 have angles with an error of 400 * 6e-8, on products of order 6.
    expected = product(first, second)
    assert abs(product(first + shift, second + shift) - expected) < 5e-4
    np.testing.assert_allclose(
        np.linalg.norm(turned(query, first)), np.linalg.norm(query), rtol=1e-5
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 16)])
def test_the_gradient_of_rope_is_that_of_its_linear_map(interleaved, scaling):
    x, pull = (normal(seed, 3, 2, HEAD_DIM) for seed in (0, 1))
    # A linear map's columns are its values at the unit vectors; no gradient is involved.
    units = np.eye(x.size, dtype=np.float32).reshape(x.size, *x.shape)

    @jit
    def both(x, pull, units):
        def turned(x):
            return rope(x, jnp.array([0, 3, 11]), 100.0, scaling, interleaved)

        return jax.vjp(turned, x)[1](pull)[0], jax.lax.map(turned, units)

    slope, columns = both(x, pull, units)
    expected = np.sum(columns * pull[None], axis=(1, 2, 3)).reshape(x.shape)
    np.testing.assert_allclose(slope, expected, atol=1e-5)


def test_stretched_wavelengths_at_their_ends():
    """Fast pairs turn as before, slow ones `factor` times more slowly."""
    from moe.attention.rotary import frequencies_of

    plain = frequencies_of(16, 1e4, None)
    for scaling in (
        LlamaScaling(8.0, 1.0, 4.0, original_context=64),
        YarnScaling(8.0, original_context=64),
    ):
        ratio = frequencies_of(16, 1e4, scaling) / plain
        np.testing.assert_allclose(ratio[0], 1.0)
        np.testing.assert_allclose(ratio[-1], 1 / 8)
        assert np.all(np.diff(ratio) <= 0) and len(set(ratio.round(6))) > 2
    with pytest.raises(ValueError, match=r"factor=0.5 would shorten the context"):
        YarnScaling(0.5, original_context=64)
