"""Decode attention: one query token per row over a KV cache."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe.attention.plain import softmax_with_sinks
from moe.precision import MASK_VALUE


def cached_attention(
    query: Float[Array, "row heads head_dim"],
    keys: Float[Array, "row kv_heads head_dim column"],
    values: Float[Array, "row kv_heads column v_head_dim"],
    visible: Bool[Array, "row column"],
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "row heads v_head_dim"]:
    """`plain_attention` of one query per row, on keys and values in the layout of
    `moe.cache.buffers.Cache`.

    Both products run along the axis that is contiguous in memory, so that a step reads the cache
    once, sequentially.

    Args:
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      sinks: as for `plain_attention`.
    """
    rows, heads, head_dim = query.shape
    by_kv_head = query.reshape(rows, keys.shape[1], -1, head_dim)
    scores = jnp.einsum("rvgk,rvkc->rvgc", by_kv_head, keys, preferred_element_type=jnp.float32)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    scores = jnp.where(visible[:, None, None], scores, MASK_VALUE)
    grouped_sinks = None if sinks is None else sinks.reshape(1, keys.shape[1], -1, 1)
    probs = softmax_with_sinks(scores, grouped_sinks).astype(values.dtype)
    out = jnp.einsum("rvgc,rvck->rvgk", probs, values, preferred_element_type=jnp.float32)
    return out.astype(values.dtype).reshape(rows, heads, values.shape[-1])
