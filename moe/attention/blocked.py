"""Attention block by block (FlashAttention, in plain JAX): no more than a block's scores exist at a
time, forward or backward.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from moe.precision import MASK_VALUE

QUERIES = 128
"""Queries of a block, at most. Fewer leave out more of what a causal mask hides, more make better
products."""
SPANS = 8
"""Stretches of queries that are compiled apart, at most, each with keys up to its own end."""
SCORES = 2**18
"""Scores of a block of several short rows, at most: about what a core's cache holds."""


def blocked_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    visible: Bool[Array, "batch time source"],
    causal: bool = False,
    scale: float | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions: `plain_attention` with its own gradient,
    which keeps the result and a number per query instead of all scores.

    With ``p = exp(s - L)``, ``L`` the log-sum of exponentials of the scores ``s``, ``o`` the result
    and ``do`` its gradient:

        dv = p^T do      ds = p (do v^T - sum(o do))      dq = scale ds k      dk = scale ds^T q

    A query that sees nothing gets a mean of values, and its scores have no gradient.

    Args:
      causal: promises that `visible` leaves out every key at a later place than the query's: about
        half of the work is left out.
      scale: multiplies the scores; None is ``head_dim**-0.5``.

    References:
      Dao, "FlashAttention-2", 2023, algorithms 1 and 2. https://arxiv.org/abs/2307.08691
    """
    batch, time, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    blocking = _blocking(time, key.shape[1], causal)
    # Padded queries see nothing, and their results are cut off.
    missing = blocking.num_blocks * blocking.queries - time
    query = jnp.pad(query, ((0, 0), (0, missing), (0, 0), (0, 0)))
    query = query.reshape(batch, -1, kv_heads, heads // kv_heads, head_dim)
    out: Array = _attend(
        jnp.moveaxis(query, 1, 3),
        jnp.moveaxis(key, 1, 2),
        jnp.moveaxis(value, 1, 2),
        jnp.pad(visible, ((0, 0), (0, missing), (0, 0))),
        blocking,
        head_dim**-0.5 if scale is None else scale,
    )
    return jnp.moveaxis(out, 3, 1).reshape(batch, -1, heads, value.shape[-1])[:, :time]


class _Span(NamedTuple):
    """Consecutive blocks of queries that meet the same keys, the first ones of the row.

    Attributes:
      first, stop: queries.
      sources: how many keys.
    """

    first: int
    stop: int
    sources: int


class _Blocking(NamedTuple):
    """How a row is cut into blocks.

    Attributes:
      queries: of a block.
      num_blocks: of the row.
      spans: of blocks.
    """

    queries: int
    num_blocks: int
    spans: tuple[_Span, ...]


def _blocking(time: int, source: int, causal: bool) -> _Blocking:
    """Blocks of equal size, in spans of equally many."""
    num_blocks = -(-time // QUERIES)
    of_span = -(-num_blocks // SPANS) if causal else num_blocks
    num_spans = -(-num_blocks // of_span)
    queries = -(-time // (num_spans * of_span))
    # Each span is a loop of its own length in keys: shapes are static, so a causal row's blocks
    # cannot each have their own.
    width = of_span * queries
    ends = [(number + 1) * width for number in range(num_spans)]
    spans = tuple(_Span(end - width, end, min(end, source) if causal else source) for end in ends)
    return _Blocking(queries, num_spans * of_span, spans)


Query = Float[Array, "kv_head group time head_dim"]
Key = Float[Array, "kv_head source head_dim"]
Value = Float[Array, "kv_head source v_head_dim"]
Output = Float[Array, "kv_head group time v_head_dim"]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    query: Array, key: Array, value: Array, visible: Array, blocking: _Blocking, scale: float
) -> Array:
    return _forward(query, key, value, visible, blocking, scale)[0]


def _forward(query, key, value, visible, blocking, scale):
    def row(given):
        return _row(blocking, scale, *given)

    out, log_sum = lax.map(
        row, (query, key, value, visible), batch_size=_rows(query, key, blocking)
    )
    return out, (query, key, value, visible, out, log_sum)


def _backward(blocking, scale, residuals, out_gradient):
    query, key, value, visible, out, log_sum = residuals
    # FlashAttention-2's D = rowsum(do o): what the softmax takes off every score's gradient.
    mean = _product("bvgtd,bvgtd->bvgt", out, out_gradient)
    # Before the rows: within them XLA would read the mask across, element by element.
    seen_by = jnp.swapaxes(visible, 1, 2)

    def row(given):
        return _row_gradient(blocking, scale, *given)

    rows = _rows(query, key, blocking)
    given = query, key, value, seen_by, log_sum, mean, out_gradient
    return *lax.map(row, given, batch_size=rows), None


_attend.defvjp(_forward, _backward)


def _rows(query: Array, key: Array, blocking: _Blocking) -> int:
    """How many rows are worked on at a time: a divisor, so that one program serves them all."""
    batch, kv_heads, group = query.shape[:3]
    most = max(SCORES // (kv_heads * group * blocking.queries * key.shape[2]), 1)
    return max(rows for rows in range(1, min(most, batch) + 1) if batch % rows == 0)


def _row(
    blocking: _Blocking,
    scale: float,
    query: Query,
    key: Key,
    value: Value,
    visible: Bool[Array, "time source"],
) -> tuple[Output, Float[Array, "kv_head group time"]]:
    """What the queries of one row get, and the log-sum of their scores' exponentials."""

    def block(query, visible, key, value):
        scores = _product("vgtd,vsd->vgts", query, key) * scale
        scores = jnp.where(visible[None, None], scores, MASK_VALUE)
        # All keys of a query are in its block: no online softmax is needed, only its log-sum is
        # kept.
        top = jnp.max(scores, axis=-1)
        powers = jnp.exp(scores - top[..., None])
        total = jnp.sum(powers, axis=-1)
        out = _product("vgts,vsd->vgtd", powers.astype(value.dtype), value)
        return (out / total[..., None]).astype(value.dtype), top + jnp.log(total)

    # One compiled loop per span; the lambda's default binds this span's keys, not the last one's.
    parts = []
    for span in blocking.spans:
        blocks = _blocks(query, span, blocking), _of_blocks(visible, span, blocking)
        known = key[:, : span.sources], value[:, : span.sources]
        parts.append(lax.map(lambda own, known=known: block(*own, *known), blocks))
    out, log_sum = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return _joined(out), _joined(log_sum)


def _row_gradient(
    blocking: _Blocking,
    scale: float,
    query: Query,
    key: Key,
    value: Value,
    seen_by: Bool[Array, "source time"],
    log_sum: Float[Array, "kv_head group time"],
    mean: Float[Array, "kv_head group time"],
    out_gradient: Output,
) -> tuple[Query, Key, Value]:
    """The gradients of one row's queries, keys and values."""
    dtype = query.dtype

    def block(query, seen_by, log_sum, mean, out_gradient, key, value):
        # Keys before queries: no product that follows needs a transposed copy of all scores.
        scores = _product("vsd,vgtd->vsgt", key, query) * scale
        scores = jnp.where(seen_by[None, :, None], scores, MASK_VALUE)
        probs = jnp.exp(scores - log_sum[:, None])
        through = _product("vsd,vgtd->vsgt", value, out_gradient) - mean[:, None]
        # Without what is not visible: where a query sees nothing its probs are not 0.
        slopes = jnp.where(seen_by[None, :, None], probs * through * scale, 0).astype(dtype)
        return (
            jnp.moveaxis(_product("vsd,vsgt->vdgt", key, slopes), 1, 3).astype(dtype),
            _product("vsgt,vgtd->vsd", slopes, query),
            _product("vsgt,vgtd->vsd", probs.astype(dtype), out_gradient),
        )

    queries, keys, values = [], [], []
    for span in blocking.spans:
        own = (
            _blocks(query, span, blocking),
            _columns(seen_by, span, blocking),
            *(_blocks(x, span, blocking) for x in (log_sum, mean, out_gradient)),
        )
        known = key[:, : span.sources], value[:, : span.sources]
        of_span = lax.map(lambda own, known=known: block(*own, *known), own)
        # A query is in one block; a key is met by many, whose gradients add up.
        queries.append(of_span[0])
        beyond = ((0, 0), (0, key.shape[1] - span.sources), (0, 0))
        keys.append(jnp.pad(jnp.sum(of_span[1], axis=0), beyond))
        values.append(jnp.pad(jnp.sum(of_span[2], axis=0), beyond))
    return (
        _joined(jnp.concatenate(queries)),
        sum(keys[1:], keys[0]).astype(dtype),
        sum(values[1:], values[0]).astype(value.dtype),
    )


def _product(formula: str, a: Array, b: Array) -> Array:
    # Raised first: XLA's CPU back end has no batched product of half precision summed in float32.
    return jnp.einsum(formula, a.astype(jnp.float32), b.astype(jnp.float32))


def _blocks(x: Array, span: _Span, blocking: _Blocking) -> Array:
    """``[kv_head, group, time, ...]`` to ``[block, kv_head, group, query, ...]`` of a span."""
    x = x[:, :, span.first : span.stop]
    x = x.reshape(*x.shape[:2], -1, blocking.queries, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)


def _of_blocks(visible: Bool[Array, "time source"], span: _Span, blocking: _Blocking) -> Array:
    """``[block, query, source]`` of a span."""
    visible = visible[span.first : span.stop, : span.sources]
    return visible.reshape(-1, blocking.queries, span.sources)


def _columns(seen_by: Bool[Array, "source time"], span: _Span, blocking: _Blocking) -> Array:
    """``[block, source, query]`` of a span."""
    seen_by = seen_by[: span.sources, span.first : span.stop]
    return jnp.moveaxis(seen_by.reshape(span.sources, -1, blocking.queries), 1, 0)


def _joined(x: Array) -> Array:
    """``[block, kv_head, group, query, ...]`` to ``[kv_head, group, time, ...]``."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
