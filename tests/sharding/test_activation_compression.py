"""FP8 numbers and their scales: how far they are from what was sent, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of

from sharding import compression

# Tokens of very different sizes, and channels too.
DRAW = np.random.default_rng(0)
X = np.float32(DRAW.normal(size=(2, 5, 7)) * 10.0 ** DRAW.integers(-12, 12, (2, 5, 1)))


def by_token(x):
    """Numbers, scales, and what comes back."""
    sent = compression.encode_tokens(x)
    return *sent, compression.decode_tokens(sent)


def by_channel(x):
    sent = compression.encode_channels(x)
    return *sent, compression.decode_channels(sent)


def of_both(x):
    """Decoded values, by token and by channel."""
    return by_token(x)[-1], by_channel(x)[-1]


def allowed(x, largest):
    """Half a unit of three bits, or of the smallest number of a group; and float32's rounding of
    quotient and product."""
    exact = np.asarray(x, np.float64)
    bound = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * np.asarray(largest, np.float64) / 448)
    return bound * (1 + 2.0**-20)


def test_fp8_tokens_are_within_half_a_unit():
    sent, scale, result = jax.device_get(jit(by_token)(X))
    assert sent.dtype == jnp.uint8 and sent.shape == X.shape
    assert scale.dtype == jnp.float32 and scale.shape == (2, 5, 1)
    result, largest = result.astype(np.float64), np.max(np.abs(X), axis=-1, keepdims=True)
    assert np.all(np.abs(result - X.astype(np.float64)) <= allowed(X, largest))
    # The largest comes back, but for the rounding of its scale.
    there = np.abs(X) == largest
    np.testing.assert_allclose(result[there], X[there], rtol=2.0**-22)


def test_fp8_channels_have_a_scale_per_group(monkeypatch):
    monkeypatch.setattr(compression, "GROUP_TOKENS", 2)
    x = X.swapaxes(0, 1).reshape(1, 5, 14)
    # Traced by itself: the size of a group is no argument.
    _, scale, result = jax.device_get(jit(lambda x: by_channel(x))(x))
    # Five tokens are two groups and a part.
    assert scale.shape == (1, 3, 14)
    magnitude = np.abs(x)[0]
    largest = np.stack([np.max(magnitude[i : i + 2], axis=0) for i in (0, 2, 4)])
    largest = np.repeat(largest, 2, axis=0)[None, :5]
    result = result.astype(np.float64)
    assert np.all(np.abs(result - x.astype(np.float64)) <= allowed(x, largest))


@pytest.mark.parametrize("number", [jnp.inf, -jnp.inf, jnp.nan])
def test_fp8_keeps_nonfinite_values(number):
    x = X.copy()
    x[1, 2, 3] = number
    result, by_channels = jax.device_get(jit(of_both)(x))
    assert np.all(np.isnan(result[1, 2])) and np.sum(np.isnan(result)) == 7
    assert np.all(np.isnan(by_channels[1, :, 3]))


def test_fp8_of_zero_and_extreme_values_is_finite():
    for number in (0, 1e-38, 3e38):
        x = np.full((3, 4), number, np.float32)
        *_, result = jit(by_token)(x)
        assert np.all(np.isfinite(result))
        np.testing.assert_allclose(result, x, rtol=2.0**-4, atol=1e-38)


def test_fp8_gather_and_scatter_round_terms_once():
    """A gather and a scatter over four devices, values and gradients, against one device."""
    mesh = mesh_of("dp4")
    draw = np.random.default_rng(1)
    x, pull = (draw.normal(size=(4, *shape)).astype(np.float32) for shape in ((3, 5), (12, 5)))
    there = jax.device_get(jit(of_both)(x))
    back = jax.device_get(jit(of_both)(pull.reshape(4, 4, 3, 5)))

    def gathered(x, pull):
        out, back = jax.vjp(lambda x: compression.gather_fp8(x[0], mesh.dp)[None], x)
        return out, back(pull)[0]

    def scattered(x, pull):
        out, back = jax.vjp(lambda x: compression.scatter_fp8(x[0], mesh.dp)[None], x)
        return out, back(pull)[0]

    def run(function, *given):
        rows = P(mesh.dp)
        mapped = jax.shard_map(function, mesh=mesh.mesh, in_specs=(rows, rows), out_specs=rows)
        return jit(mapped)(*given)

    out, gradient = run(gathered, x, pull)
    every = there[0].reshape(12, 5)
    np.testing.assert_array_equal(out, np.broadcast_to(every, (4, 12, 5)))
    terms = back[1]
    # One order of four float32 terms or another.
    np.testing.assert_allclose(gradient, np.sum(terms, axis=0), rtol=1e-6, atol=1e-6)

    out, gradient = run(scattered, pull, x)
    terms = back[0]
    np.testing.assert_allclose(out, np.sum(terms, axis=0), rtol=1e-6, atol=1e-6)
    every = there[1].reshape(12, 5)
    np.testing.assert_array_equal(gradient, np.broadcast_to(every, (4, 12, 5)))
