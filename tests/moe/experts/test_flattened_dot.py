"""A product with columns of several axes, against the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of

from moe.experts.feed_forward import flattened_dot

TOKENS, INNER, HALVES, HIDDEN = 5, 6, 2, 7


def given(dtype=jnp.float32):
    draw = np.random.default_rng(0)
    x, weights, pull = (
        draw.normal(size=shape)
        for shape in ((TOKENS, INNER), (INNER, HALVES, HIDDEN), (TOKENS, HALVES * HIDDEN))
    )
    return jnp.asarray(x, dtype), jnp.asarray(weights, jnp.float32), jnp.asarray(pull, dtype)


def plain(x, weights):
    return x @ weights.astype(x.dtype).reshape(INNER, -1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_those_of_the_plain_product(dtype):
    x, weights, pull = given(dtype)

    def run(function):
        def both(x, weights):
            out, back = jax.vjp(function, x, weights)
            return out, *back(pull)

        return jit(both)(x, weights)

    found, expected = run(flattened_dot), run(plain)
    assert [a.dtype for a in found] == [dtype, dtype, jnp.float32]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_flattened_dot_residual_is_weight_as_passed():
    kept = []

    def run(x, weights):
        out, back = jax.vjp(flattened_dot, x, weights)
        kept.extend((a.shape, a.dtype) for a in jax.tree.leaves(back))
        return out

    x, weights, _ = given(jnp.bfloat16)
    jax.eval_shape(run, x, weights)
    assert sorted(shape for shape, _ in kept) == [x.shape, weights.shape]


def test_gradients_are_summed_over_the_devices_that_share_the_weight():
    mesh = mesh_of("dp2")
    x, weights, pull = given()
    x, pull = (jnp.concatenate([array, -2 * array]) for array in (x, pull))

    def pulled(x, weights, pull):
        return jax.lax.psum(jnp.sum(flattened_dot(x, weights) * pull), mesh.axes)

    specs = P(mesh.axes), P(), P(mesh.axes)
    sharded = jax.shard_map(pulled, mesh=mesh.mesh, in_specs=specs, out_specs=P())
    by_weights = jit(jax.grad(sharded, argnums=1))(x, weights, pull)
    expected = jnp.einsum("ni,no->io", x, pull).reshape(weights.shape)
    # Sums of ten products of order one.
    np.testing.assert_allclose(by_weights, expected, atol=1e-5)
