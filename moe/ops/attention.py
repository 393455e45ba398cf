"""Attention: the reference implementations, with all scores in memory, and the custom gradient that
the faster ones share (FlashAttention), which saves the output and one number per query (the
log-sum-exp) instead of all scores.

With ``p = exp(s - L)``, ``L`` the log-sum-exp of the scores ``s``, ``o`` the output and ``do`` its
gradient:

    dv = p^T do      ds = p (do v^T - D)      dq = scale ds k      dk = scale ds^T q

``D = rowsum(do o)`` is a number per query (`dot_do_o`).

References:
  Dao, "FlashAttention-2", 2023, algorithms 1 and 2. https://arxiv.org/abs/2307.08691
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from moe.ops.mask import Mask
from moe.ops.precision import MASK_VALUE
from moe.remat import ATTENDED
from sharding.collectives import match_varying


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
    out = jnp.einsum("bvgts,bsvk->btvgk", probs, value, preferred_element_type=jnp.float32)
    out = out.astype(value.dtype).reshape(batch, time, heads, value.shape[-1])
    return checkpoint_name(out, ATTENDED)


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


def cached_attention(
    query: Float[Array, "row heads head_dim"],
    keys: Float[Array, "cached kv_heads head_dim column"],
    values: Float[Array, "cached kv_heads column v_head_dim"],
    visible: Bool[Array, "row column"],
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "row heads v_head_dim"]:
    """`plain_attention` of one query per row, on keys and values in the layout of
    `moe.cache.Cache`.

    Both products run along the axis that is contiguous in memory, so that a step reads the cache
    once, sequentially.

    Args:
      keys: of each row, or of one row that all queries read: its tokens, one after the other.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      sinks: as for `plain_attention`.
    """
    rows, heads, head_dim = query.shape
    by_kv_head = query.reshape(rows, keys.shape[1], -1, head_dim)
    row = "r"
    if keys.shape[0] < rows:
        row, keys, values = "", keys[0], values[0]
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product(f"rvgk,{row}vkc->rvgc", by_kv_head, keys)
    scores = scores * (head_dim**-0.5 if scale is None else scale)
    scores = jnp.where(visible[:, None, None], scores, MASK_VALUE)
    grouped_sinks = None if sinks is None else sinks.reshape(1, by_kv_head.shape[1], -1, 1)
    probs = softmax_with_sinks(scores, grouped_sinks).astype(values.dtype)
    out = product(f"rvgc,{row}vck->rvgk", probs, values)
    return out.astype(values.dtype).reshape(rows, heads, values.shape[-1])


Query = Float[Array, "*batch kv_head group time head_dim"]
Key = Float[Array, "*batch kv_head source head_dim"]
Value = Float[Array, "*batch kv_head source v_head_dim"]
Output = Float[Array, "*batch kv_head group time v_head_dim"]
PerQuery = Float[Array, "*batch kv_head group time"]


class Flash(NamedTuple):
    """An implementation of the forward and backward pass over a set of keys.

    Attributes:
      attend: ``(query, key, value, mask, scale)`` to the attention output over these keys, and the
        log-sum-exp of the scores: `moe.attention.blocked.attend`.
      attend_gradient: ``(query, key, value, mask, log_sum, softmax_d, out_gradient, scale)`` to the
        gradients of queries, keys and values: `moe.attention.blocked.attend_gradient`.
    """

    attend: Callable[..., tuple[Array, Array]]
    attend_gradient: Callable[..., tuple[Array, Array, Array]]


def flash_attention(
    flash: Flash,
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions.

    The output of a query that sees no key is finite and has no gradient.

    Args:
      flash: the implementation that computes the scores.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      sinks: as for `moe.ops.attention.plain_attention`: keys that all queries see, of these
        scores and without value.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = (
        group_query_heads(query, key.shape[2]),
        *map(heads_before_time, (key, value)),
    )
    arrays = match_varying((query, key, value, sinks), mask)
    return flatten_heads(_attend(*arrays, mask, scale, flash))


def group_query_heads(
    x: Float[Array, "batch time heads width"], kv_heads: int
) -> Float[Array, "batch kv_head group time width"]:
    """Groups the query heads of queries, or of attention outputs, by key/value head."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]), 1, 3)


def flatten_heads(
    x: Float[Array, "batch kv_head group time width"],
) -> Float[Array, "batch time heads width"]:
    """The reverse of `group_query_heads`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def heads_before_time(
    x: Float[Array, "batch time kv_heads width"],
) -> Float[Array, "batch kv_head time width"]:
    """Moves the head axis of keys and values before time; applied twice it is the identity."""
    return jnp.swapaxes(x, 1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    mask: Mask,
    scale: float,
    flash: Flash,
) -> Array:
    return _forward(query, key, value, sinks, mask, scale, flash)[0]


def _forward(query, key, value, sinks, mask, scale, flash):
    out, log_sum = flash.attend(query, key, value, mask, scale)
    out, log_sum = add_sinks(out, log_sum, sinks)
    out, log_sum = (checkpoint_name(x, ATTENDED) for x in (out.astype(value.dtype), log_sum))
    return out, (query, key, value, sinks, mask, out, log_sum)


def _backward(scale, flash, residuals, out_gradient):
    query, key, value, sinks, mask, out, log_sum = residuals
    softmax_d = dot_do_o(out, out_gradient)
    grads = flash.attend_gradient(query, key, value, mask, log_sum, softmax_d, out_gradient, scale)
    input_gradients = (
        gradient.astype(x.dtype) for gradient, x in zip(grads, (query, key, value), strict=True)
    )
    sinks_gradients = None if sinks is None else sinks_gradient(sinks, log_sum, softmax_d)
    return *input_gradients, sinks_gradients, None


_attend.defvjp(_forward, _backward)


def add_sinks(
    out: Output, log_sum: PerQuery, sinks: Float[Array, "heads"] | None
) -> tuple[Output, PerQuery]:
    """Attention output and log-sum-exp with the sink of each head as one more score."""
    if sinks is None:
        return out, log_sum
    total = jnp.logaddexp(log_sum, _broadcast_sinks(sinks, log_sum))
    return out * jnp.exp(log_sum - total)[..., None], total


def sinks_gradient(
    sinks: Float[Array, "heads"], log_sum: PerQuery, softmax_d: PerQuery
) -> Float[Array, "heads"]:
    """Gradient of the sinks, keys that have no value: ``-sum p D``.

    Args:
      log_sum: log-sum-exp with the sinks included.
      softmax_d: D, the result of `dot_do_o`.
    """
    per_query = jnp.exp(_broadcast_sinks(sinks, log_sum) - log_sum) * softmax_d
    return -jnp.sum(per_query, axis=(0, -1)).reshape(-1)


def _broadcast_sinks(sinks: Float[Array, "heads"], log_sum: PerQuery) -> PerQuery:
    return jnp.broadcast_to(sinks.reshape(1, *log_sum.shape[1:3], 1), log_sum.shape)


def dot_do_o(out: Output, out_gradient: Output) -> PerQuery:
    """FlashAttention-2's ``D = rowsum(do o)``, which the gradient of the softmax subtracts from the
    gradient of every probability."""
    return product("...td,...td->...t", out, out_gradient)


def product(formula: str, a: Array, b: Array) -> Array:
    """`jnp.einsum` summed in float32 and not rounded."""
    if jax.default_backend() == "cpu":
        # XLA's CPU back end has no batched product of half precision summed in float32.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)
