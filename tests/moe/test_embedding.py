import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.embedding import lookup


def looked_up(table, tokens, factors):
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    whole = jax.sharding.PartitionSpec()
    local = jax.shard_map(
        lambda table: jnp.sum(lookup(table, tokens) * factors),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
    )
    return jax.value_and_grad(local)(table)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_the_gradient_of_a_frequent_one(dtype):
    """A row that 400 tokens have: in bfloat16, 256 and 1 are 256."""
    table = jnp.asarray(np.arange(15).reshape(5, 3) / 7, dtype)
    tokens = jnp.asarray([3] * 400 + [0, 4, 4])
    factors = jnp.ones((403, 3))
    value, gradient = looked_up(table, tokens, factors)
    exact = np.asarray(table, np.float32)
    expected = 400.0 * exact[3].sum() + exact[0].sum() + 2 * exact[4].sum()
    np.testing.assert_allclose(value, expected, rtol=1e-5)  # a float32 sum of 1209 terms
    assert gradient.dtype == dtype
    counts = np.array([1, 0, 0, 400, 2], np.float32)[:, None]
    np.testing.assert_array_equal(gradient.astype(jnp.float32), np.broadcast_to(counts, (5, 3)))
