"""FP8 numbers and their scales: how far they are from what was sent, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of

from sharding import activation_wire as wire

# Tokens of very different sizes, and channels too.
DRAW = np.random.default_rng(0)
X = jnp.asarray(
    DRAW.normal(size=(2, 5, 7)) * 10.0 ** DRAW.integers(-12, 12, (2, 5, 1)), jnp.float32
)


def allowed(x, largest):
    """Half a unit of three bits, or of the smallest number of a group; and float32's rounding of
    quotient and product."""
    exact = np.asarray(x, np.float64)
    bound = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * np.asarray(largest, np.float64) / 448)
    return bound * (1 + 2.0**-20)


def test_a_token_is_off_by_half_a_unit():
    sent, scale = wire.by_token(X)
    assert sent.dtype == jnp.uint8 and sent.shape == X.shape
    assert scale.dtype == jnp.float32 and scale.shape == (2, 5, 1)
    found = np.asarray(wire.of_tokens((sent, scale)), np.float64)
    largest = jnp.max(jnp.abs(X), axis=-1, keepdims=True)
    assert np.all(np.abs(found - np.asarray(X, np.float64)) <= allowed(X, largest))
    # The largest comes back, but for the rounding of its scale.
    there = np.abs(np.asarray(X)) == np.asarray(largest)
    np.testing.assert_allclose(found[there], np.asarray(X)[there], rtol=2.0**-22)


def test_a_channel_of_a_group_has_a_scale_of_its_own(monkeypatch):
    monkeypatch.setattr(wire, "GROUP", 2)
    x = X.swapaxes(0, 1).reshape(1, 5, 14)
    sent, scale = wire.by_channel(x)
    # Five tokens are two groups and a part.
    assert scale.shape == (1, 3, 14)
    magnitude = np.abs(np.asarray(x))[0]
    largest = np.stack([np.max(magnitude[i : i + 2], axis=0) for i in (0, 2, 4)])
    largest = np.repeat(largest, 2, axis=0)[None, :5]
    found = np.asarray(wire.of_channels((sent, scale)), np.float64)
    assert np.all(np.abs(found - np.asarray(x, np.float64)) <= allowed(x, largest))


@pytest.mark.parametrize("number", [jnp.inf, -jnp.inf, jnp.nan])
def test_what_is_not_finite_does_not_come_back_as_a_number(number):
    x = X.at[1, 2, 3].set(number)
    found = wire.of_tokens(wire.by_token(x))
    assert np.all(np.isnan(found[1, 2])) and np.sum(np.isnan(found)) == 7
    assert np.all(np.isnan(wire.of_channels(wire.by_channel(x))[1, :, 3]))


def test_nothing_and_hardly_anything_stay_finite():
    for x in (jnp.zeros((3, 4)), jnp.full((3, 4), 1e-38), jnp.full((3, 4), 3e38)):
        found = wire.of_tokens(wire.by_token(x))
        assert np.all(np.isfinite(found))
        np.testing.assert_allclose(found, x, rtol=2.0**-4, atol=1e-38)


def test_sums_are_of_terms_rounded_once():
    """A gather and a scatter over four devices, values and gradients, against one device."""
    mesh = mesh_of("dp4")
    draw = np.random.default_rng(1)
    x, pull = (
        jnp.asarray(draw.normal(size=(4, *shape)), jnp.float32) for shape in ((3, 5), (12, 5))
    )

    def gathered(x, pull):
        out, back = jax.vjp(lambda x: wire.gather_fp8(x[0], mesh.dp)[None], x)
        return out, back(pull)[0]

    def scattered(x, pull):
        out, back = jax.vjp(lambda x: wire.scatter_fp8(x[0], mesh.dp)[None], x)
        return out, back(pull)[0]

    def run(function, *given):
        rows = P(mesh.dp)
        mapped = jax.shard_map(function, mesh=mesh.mesh, in_specs=(rows, rows), out_specs=rows)
        return jit(mapped)(*given)

    out, gradient = run(gathered, x, pull)
    every = wire.of_tokens(wire.by_token(x)).reshape(12, 5)
    np.testing.assert_array_equal(out, np.broadcast_to(every, (4, 12, 5)))
    terms = wire.of_channels(wire.by_channel(pull.reshape(4, 4, 3, 5)))
    # One order of four float32 terms or another.
    np.testing.assert_allclose(gradient, np.sum(terms, axis=0), rtol=1e-6, atol=1e-6)

    out, gradient = run(scattered, pull, x)
    terms = wire.of_tokens(wire.by_token(pull.reshape(4, 4, 3, 5)))
    np.testing.assert_allclose(out, np.sum(terms, axis=0), rtol=1e-6, atol=1e-6)
    every = wire.of_channels(wire.by_channel(x)).reshape(12, 5)
    np.testing.assert_array_equal(gradient, np.broadcast_to(every, (4, 12, 5)))
