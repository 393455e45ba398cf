"""Reference implementation of attention, with all scores in memory; the faster ones are compared
with it."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from moe.precision import MASK_VALUE
from moe.remat import ATTENDED


def plain_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    visible: Bool[Array, "batch time source"],
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions.

    Scores, softmax and both sums are float32 whatever the arrays are; its weights, and the result,
    are rounded to the dtype of `value`.

    Query head ``h`` attends to key/value head ``h // (heads / kv_heads)``. The output of a query
    that sees no key (padding) is the mean of all values: finite, and never used.

    Args:
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      sinks: a score of each head that no key has, float32: `softmax_with_sinks`.
    """
    batch, time, heads, _ = query.shape
    scores = scaled_scores(query, key, scale)
    scores = jnp.where(visible[:, None, None], scores, MASK_VALUE)
    grouped_sinks = None if sinks is None else sinks.reshape(1, key.shape[2], -1, 1, 1)
    probs = softmax_with_sinks(scores, grouped_sinks).astype(value.dtype)
    out = jnp.einsum("bvgts,bsvk->btvgk", probs, value, preferred_element_type=jnp.float32).astype(
        value.dtype
    )
    return checkpoint_name(out.reshape(batch, time, heads, value.shape[-1]), ATTENDED)


def softmax_with_sinks(
    scores: Float[Array, "*batch source"], sinks: Float[Array, "*_batch one"] | None
) -> Float[Array, "*batch source"]:
    """Softmax over the last axis with a sink in the denominator: ``exp(s) / (sum exp(s) +
    exp(sink))``.

    Args:
      sinks: broadcast to `scores`, with 1 as the last dimension; None is none.
    """
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink_scores = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, sink_scores], axis=-1), axis=-1)[..., :-1]


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


def causal_mask(valid: Bool[Array, "batch time"]) -> Bool[Array, "batch time time"]:
    """Causal mask without padding: each position sees itself and earlier ones that are valid."""
    time = valid.shape[1]
    order = jnp.arange(time)
    return valid[:, None, :] & (order[:, None] >= order[None, :])[None]
