"""Attention with all scores at once: what the faster implementations are compared with."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe.precision import NOTHING


def read_values(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    visible: Bool[Array, "batch time source"],
    scale: float | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """``softmax(scale q k) v`` over the visible positions.

    Scores, softmax and both sums are float32 whatever the arrays are; its weights, and the result,
    are rounded to the dtype of `value`.

    Query head ``h`` reads key/value head ``h // (heads / kv_heads)``. A query that sees nothing
    (padding) reads the plain mean: finite, and used by nobody.

    Args:
      scale: multiplies the scores; None is ``head_dim**-0.5``.
    """
    batch, time, heads, _ = query.shape
    scores = scaled_scores(query, key, scale)
    scores = jnp.where(visible[:, None, None], scores, NOTHING)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    read = jnp.einsum(
        "bvgts,bsvk->btvgk", weights, value, preferred_element_type=jnp.float32
    ).astype(value.dtype)
    return read.reshape(batch, time, heads, value.shape[-1])


def scaled_scores(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    scale: float | None,
) -> Float[Array, "batch kv_heads group time source"]:
    """``scale q k`` summed in float32 and never rounded, the query heads of a key/value head
    together."""
    batch, time, _, head_dim = query.shape
    query = query.reshape(batch, time, key.shape[2], -1, head_dim)
    scores = jnp.einsum("btvgk,bsvk->bvgts", query, key, preferred_element_type=jnp.float32)
    return scores * (head_dim**-0.5 if scale is None else scale)


def causal(valid: Bool[Array, "batch time"]) -> Bool[Array, "batch time time"]:
    """Which earlier or equal positions each position may read: those that are not padding."""
    time = valid.shape[1]
    order = jnp.arange(time)
    return valid[:, None, :] & (order[:, None] >= order[None, :])[None]
