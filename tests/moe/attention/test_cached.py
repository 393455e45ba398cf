"""Attention over a cache against all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.attention.cached import cached_attention
from moe.attention.plain import plain_attention

ROWS, HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, COLUMNS = 5, 6, 2, 4, 3, 11


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_plain_attention_of_one_query_per_row(dtype, scale):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (ROWS, HEADS, HEAD_DIM), dtype)
    key = jax.random.normal(keys[1], (ROWS, COLUMNS, KV_HEADS, HEAD_DIM), dtype)
    value = jax.random.normal(keys[2], (ROWS, COLUMNS, KV_HEADS, V_HEAD_DIM), dtype)
    visible = jnp.arange(COLUMNS)[None] <= jnp.array([0, 10, 3, 7, 5])[:, None]
    expected = plain_attention(query[:, None], key, value, visible[:, None], scale)[:, 0]
    found = cached_attention(
        query, jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2), visible, scale
    )
    assert found.dtype == dtype and found.shape == (ROWS, HEADS, V_HEAD_DIM)
    # Sums in another order; in half precision one rounding of a result near 1 either way.
    tolerance = 1e-6 if dtype == jnp.float32 else 8e-3
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected.astype(jnp.float32), atol=tolerance
    )
