"""Attention over a cache against all scores at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit

from moe.ops.attention import cached_attention, plain_attention

ROWS, HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM, COLUMNS = 5, 6, 2, 4, 3, 11


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_plain_attention_of_one_query_per_row(dtype, scale):
    draw = np.random.default_rng(0)
    shapes = (HEADS, HEAD_DIM), (COLUMNS, KV_HEADS, HEAD_DIM), (COLUMNS, KV_HEADS, V_HEAD_DIM)
    given = [draw.normal(size=(ROWS, *shape)).astype(dtype) for shape in shapes]
    visible = np.arange(COLUMNS)[None] <= np.array([0, 10, 3, 7, 5])[:, None]

    @jit
    def both(query, key, value, visible):
        whole = plain_attention(query[:, None], key, value, visible[:, None], scale)[:, 0]
        columns_last = jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2)
        return whole, cached_attention(query, *columns_last, visible, scale)

    expected, found = jax.device_get(both(*given, visible))
    assert found.dtype == dtype and found.shape == (ROWS, HEADS, V_HEAD_DIM)
    # Sums in another order; in half precision one rounding of a result near 1 either way.
    tolerance = 1e-6 if dtype == jnp.float32 else 8e-3
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), atol=tolerance
    )
