"""Blockwise attention (FlashAttention in plain JAX): no more than one block of scores exists at a
time, forward or backward, and blocks that a mask hides completely are skipped.

`attend` and `attend_gradient` work on a subset of the keys: ring attention
(`context_parallel.ring`) merges their results rank after rank.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from moe.attention.blocking import (
    Blocking,
    Span,
    blocking_of,
    blocks_of,
    chunk_of,
    joined,
    keys_of,
    lengthened,
    marks_in_blocks,
)
from moe.attention.flash import (
    Flash,
    Key,
    Output,
    PerQuery,
    Query,
    Value,
    flash_attention,
    product,
)
from moe.attention.mask import Marks, Mask, Window, may_meet, visible
from moe.precision import MASK_VALUE
from sharding.collectives import vary, varying

SCORES = 2**18
"""Scores of a block of multiple short rows, at most: about as many as a core's cache holds."""


def blocked_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions: `plain_attention` with a custom gradient
    that saves the output and one number per query instead of all scores (`moe.attention.flash`).

    Args:
      mask: where it is `causal`, about half of the work is skipped; in rows with more than `KEYS`
        keys, also each block whose ranges of positions and segment ids show it to be hidden, for
        example by a window.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      sinks: as for `plain_attention`.
    """
    return flash_attention(BLOCKED, query, key, value, mask, scale, sinks)


def attend(
    query: Query, key: Key, value: Value, mask: Mask, scale: float
) -> tuple[Output, PerQuery]:
    """Attention output over these keys, float32 and not rounded, and the log-sum-exp of the scores:
    `MASK_VALUE`, or little more, where a query sees none of them.

    Args:
      query, key, value: with one batch dimension in front, all varying over the same mesh axes
        (`sharding.collectives.match_varying`).
    """
    time, blocking = query.shape[-2], blocking_of(query.shape[-2], key.shape[-2], mask.causal)
    # Padded queries see nothing, and their results are cut off.
    marks = marks_in_blocks(mask.query, blocking)
    given = lengthened(query, blocking, -2), key, value, marks, mask.key
    out, log_sum = _over_rows(
        partial(_row, blocking, scale, mask.window), given, _rows(query, key, blocking)
    )
    return out[..., :time, :], log_sum[..., :time]


def attend_gradient(
    query: Query,
    key: Key,
    value: Value,
    mask: Mask,
    log_sum: PerQuery,
    mean: PerQuery,
    out_gradient: Output,
    scale: float,
) -> tuple[Query, Key, Value]:
    """Gradients of queries, keys and values from the scores with these keys, in float32.

    Args:
      log_sum: log-sum-exp over all the keys of the softmax, not these alone.
      mean: `slope_mean` of the output over all keys.
    """
    time, blocking = query.shape[-2], blocking_of(query.shape[-2], key.shape[-2], mask.causal)
    marks = marks_in_blocks(mask.query, blocking)
    query, out_gradient = (lengthened(x, blocking, -2) for x in (query, out_gradient))
    log_sum, mean = (lengthened(x, blocking, -1) for x in (log_sum, mean))
    given = query, key, value, marks, mask.key, log_sum, mean, out_gradient
    grads = _over_rows(
        partial(_row_gradient, blocking, scale, mask.window), given, _rows(query, key, blocking)
    )
    return grads[0][..., :time, :], grads[1], grads[2]


BLOCKED = Flash(attend, attend_gradient)


def _rows(query: Array, key: Array, blocking: Blocking) -> int:
    """Number of rows per loop iteration: a divisor of the batch, so that one compiled body does."""
    batch, kv_heads, group = query.shape[:3]
    most = max(SCORES // (kv_heads * group * blocking.queries * key.shape[2]), 1)
    return max(rows for rows in range(1, min(most, batch) + 1) if batch % rows == 0)


def _over_rows(function, given, rows: int):
    # One row at a time is not a batch of one: under `vmap` a `cond` computes both branches.
    return lax.map(lambda x: function(*x), given, batch_size=rows if rows > 1 else None)


class _Softmax(NamedTuple):
    """State of an online softmax over a subset of the keys.

    The output is ``out / total``; exponentials are relative to ``exp(top)``.
    """

    top: Array
    total: Array
    out: Array


def _row(
    blocking: Blocking,
    scale: float,
    window: Window,
    query: Query,
    key: Key,
    value: Value,
    marks: Marks,
    source_marks: Marks,
) -> tuple[Output, PerQuery]:
    """Attention output of one row's queries, and the log-sum-exp of their scores."""

    def softmax(query: Query, key: Key, value: Value, seen: Bool[Array, "time source"]) -> _Softmax:
        scores = product("vgtd,vsd->vgts", query, key) * scale
        scores = jnp.where(seen[None, None], scores, MASK_VALUE)
        top = jnp.max(scores, axis=-1)
        powers = jnp.exp(scores - top[..., None])
        total = jnp.sum(powers, axis=-1)
        return _Softmax(top, total, product("vgts,vsd->vgtd", powers.astype(value.dtype), value))

    def block(span: Span, key: Key, value: Value, sources: Marks, query: Query, marks: Marks):
        if span.num_chunks == 1:
            found = softmax(query, key, value, visible(marks, sources, window))
            return found.out / found.total[..., None], found.top + jnp.log(found.total)

        def add(number: Array, found: _Softmax) -> _Softmax:
            of_chunk = Marks(*(chunk_of(x, number, span, -1) for x in sources))

            def met(found: _Softmax) -> _Softmax:
                keys, values = (chunk_of(x, number, span, -2) for x in (key, value))
                seen = visible(marks, of_chunk, window)
                return _merged(found, softmax(query, keys, values, seen))

            return lax.cond(may_meet(marks, of_chunk, window), met, lambda x: x, found)

        nothing = jnp.zeros((*query.shape[:-1], value.shape[-1]), jnp.float32)
        start = _Softmax(nothing[..., 0] + MASK_VALUE, nothing[..., 0], nothing)
        start = vary(start, tuple(varying(query)))
        found = lax.fori_loop(0, span.num_chunks, add, start)
        total = jnp.where(found.total == 0, 1, found.total)
        return found.out / total[..., None], found.top + jnp.log(total)

    # One compiled loop per span, as shapes differ. The lambda's defaults bind this span's arrays.
    parts = []
    for span in blocking.spans:
        own = (
            blocks_of(query, span, blocking, 2),
            Marks(*(x[blocking.blocks(span)] for x in marks)),
        )
        known = keys_of(span, key, value, source_marks)
        parts.append(lax.map(lambda own, span=span, known=known: block(span, *known, *own), own))
    out, log_sum = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return joined(out), joined(log_sum)


def _merged(a: _Softmax, b: _Softmax) -> _Softmax:
    """Combines two online softmax states into one over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return _Softmax(
        top,
        a.total * of_a + b.total * of_b,
        a.out * of_a[..., None] + b.out * of_b[..., None],
    )


def _row_gradient(
    blocking: Blocking,
    scale: float,
    window: Window,
    query: Query,
    key: Key,
    value: Value,
    marks: Marks,
    source_marks: Marks,
    log_sum: PerQuery,
    mean: PerQuery,
    out_gradient: Output,
) -> tuple[Query, Key, Value]:
    """Gradients of one row's queries, keys and values."""
    dtype = query.dtype

    def slopes(own, key: Key, value: Value, sources: Marks) -> tuple[Array, Array, Array]:
        query, marks, log_sum, mean, out_gradient = own
        # Keys before queries: none of the following products needs a transposed copy of the scores.
        seen = jnp.swapaxes(visible(marks, sources, window), 0, 1)[None, :, None]
        scores = product("vsd,vgtd->vsgt", key, query) * scale
        probs = jnp.where(seen, jnp.exp(scores - log_sum[:, None]), 0)
        through = product("vsd,vgtd->vsgt", value, out_gradient) - mean[:, None]
        slopes = (probs * through * scale).astype(dtype)
        return (
            jnp.moveaxis(product("vsd,vsgt->vdgt", key, slopes), 1, 3),
            product("vsgt,vgtd->vsd", slopes, query),
            product("vsgt,vgtd->vsd", probs.astype(dtype), out_gradient),
        )

    def block(span: Span, key: Key, value: Value, sources: Marks, sums, own):
        if span.num_chunks == 1:
            of_query, *of_keys = slopes(own, key, value, sources)
            return tuple(a + b for a, b in zip(sums, of_keys, strict=True)), of_query

        def add(number: Array, sums):
            of_chunk = Marks(*(chunk_of(x, number, span, -1) for x in sources))
            keys, values = (chunk_of(x, number, span, -2) for x in (key, value))

            def hidden():
                shapes = own[0].shape, keys.shape, values.shape
                nothing = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
                return vary(nothing, tuple(varying(own[0])))

            meet = may_meet(own[1], of_chunk, window)
            of_query, *of_keys = lax.cond(meet, lambda: slopes(own, keys, values, of_chunk), hidden)
            added = (
                lax.dynamic_update_slice_in_dim(
                    whole, chunk_of(whole, number, span, -2) + part, number * span.chunk, axis=-2
                )
                for whole, part in zip(sums[1:], of_keys, strict=True)
            )
            return sums[0] + of_query, *added

        of_query = vary(jnp.zeros(own[0].shape, jnp.float32), tuple(varying(own[0])))
        of_query, *sums = lax.fori_loop(0, span.num_chunks, add, (of_query, *sums))
        return tuple(sums), of_query

    # A query is in one block. A key is in the scores of many blocks, whose gradients are summed.
    queries = []
    sums = [vary(jnp.zeros(x.shape, jnp.float32), tuple(varying(x))) for x in (key, value)]
    for span in blocking.spans:
        own = (
            blocks_of(query, span, blocking, 2),
            Marks(*(x[blocking.blocks(span)] for x in marks)),
            *(blocks_of(x, span, blocking, 2) for x in (log_sum, mean, out_gradient)),
        )
        known = keys_of(span, key, value, source_marks)
        so_far = keys_of(span, sums[0], sums[1], source_marks)[:2]
        of_keys, of_query = lax.scan(
            lambda sums, own, span=span, known=known: block(span, *known, sums, own), so_far, own
        )
        queries.append(of_query)
        sums = [
            whole.at[:, : span.sources].set(part[:, : span.sources])
            for whole, part in zip(sums, of_keys, strict=True)
        ]
    return joined(jnp.concatenate(queries)), sums[0], sums[1]
