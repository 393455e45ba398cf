"""Attention block by block (FlashAttention, in plain JAX): no more than a block's scores exist at a
time, forward or backward, and blocks that a mask hides whole are left out.

`attend` and `attend_gradient` speak about some of the keys: a ring (`context_parallel.ring`) merges
what it learns from one rank after the other.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
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
)
from moe.attention.mask import Marks, Mask, Window, may_meet, visible
from moe.precision import MASK_VALUE
from moe.remat import ATTENDED
from sharding.collectives import vary, varying

SCORES = 2**18
"""Scores of a block of several short rows, at most: about what a core's cache holds."""

Query = Float[Array, "*batch kv_head group time head_dim"]
Key = Float[Array, "*batch kv_head source head_dim"]
Value = Float[Array, "*batch kv_head source v_head_dim"]
Output = Float[Array, "*batch kv_head group time v_head_dim"]
PerQuery = Float[Array, "*batch kv_head group time"]


def blocked_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions: `plain_attention` with its own gradient,
    which keeps the result and a number per query instead of all scores.

    With ``p = exp(s - L)``, ``L`` the log-sum of exponentials of the scores ``s``, ``o`` the result
    and ``do`` its gradient:

        dv = p^T do      ds = p (do v^T - sum(o do))      dq = scale ds k      dk = scale ds^T q

    A query that sees nothing gets something finite, without a gradient.

    Args:
      mask: where it is `causal`, about half of the work is left out; of rows with more than `KEYS`
        keys, each block that the ranges of its marks tell to be hidden, by a window, say.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      sinks: as for `plain_attention`: keys that all queries see, of these scores and without value.

    References:
      Dao, "FlashAttention-2", 2023, algorithms 1 and 2. https://arxiv.org/abs/2307.08691
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grouped = in_groups(query, key.shape[2]), by_head(key), by_head(value), sinks
    return in_heads(_attend(*alike(grouped, mask), mask, scale))


def in_groups(
    x: Float[Array, "batch time heads width"], kv_heads: int
) -> Float[Array, "batch kv_head group time width"]:
    """Of queries, or of what they get: those of a key/value head together."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]), 1, 3)


def in_heads(
    x: Float[Array, "batch kv_head group time width"],
) -> Float[Array, "batch time heads width"]:
    """The reverse of `in_groups`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def by_head(
    x: Float[Array, "batch time kv_heads width"],
) -> Float[Array, "batch kv_head time width"]:
    """Of keys and values; its own reverse on what it gives."""
    return jnp.swapaxes(x, 1, 2)


def alike(arrays: tuple[Any, ...], *others: object) -> tuple[Any, ...]:
    """`arrays` typed as varying over every mesh axis that one of them, or of `others`, varies over:
    what loops carry and what branches give must be of one type. None stays None."""
    leaves = [x for x in jax.tree.leaves((arrays, others)) if isinstance(x, jax.Array)]
    axes = frozenset[str]().union(*(varying(x) for x in leaves))
    return vary(arrays, tuple(sorted(axes)))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: Array, key: Array, value: Array, sinks: Array | None, mask: Mask, scale: float
) -> Array:
    return _forward(query, key, value, sinks, mask, scale)[0]


def _forward(query, key, value, sinks, mask, scale):
    out, log_sum = attend(query, key, value, mask, scale)
    out, log_sum = beside_sinks(out, log_sum, sinks)
    out, log_sum = (checkpoint_name(x, ATTENDED) for x in (out.astype(value.dtype), log_sum))
    return out, (query, key, value, sinks, mask, out, log_sum)


def _backward(scale, residuals, out_gradient):
    query, key, value, sinks, mask, out, log_sum = residuals
    mean = slope_mean(out, out_gradient)
    grads = attend_gradient(query, key, value, mask, log_sum, mean, out_gradient, scale)
    given = zip(grads, (query, key, value), strict=True)
    of_heads = (gradient.astype(x.dtype) for gradient, x in given)
    of_sinks = None if sinks is None else sinks_gradient(sinks, log_sum, mean)
    return *of_heads, of_sinks, None


_attend.defvjp(_forward, _backward)


def beside_sinks(
    out: Output, log_sum: PerQuery, sinks: Float[Array, "heads"] | None
) -> tuple[Output, PerQuery]:
    """What queries get, and the log-sum of their scores' exponentials, with one more score."""
    if sinks is None:
        return out, log_sum
    total = jnp.logaddexp(log_sum, _of_queries(sinks, log_sum))
    return out * jnp.exp(log_sum - total)[..., None], total


def sinks_gradient(
    sinks: Float[Array, "heads"], log_sum: PerQuery, mean: PerQuery
) -> Float[Array, "heads"]:
    """That of a key without a value: ``-sum p D``.

    Args:
      log_sum: with the sinks.
      mean: `slope_mean`.
    """
    through = jnp.exp(_of_queries(sinks, log_sum) - log_sum) * mean
    return -jnp.sum(through, axis=(0, -1)).reshape(-1)


def _of_queries(sinks: Float[Array, "heads"], log_sum: PerQuery) -> PerQuery:
    return jnp.broadcast_to(sinks.reshape(1, *log_sum.shape[1:3], 1), log_sum.shape)


def slope_mean(out: Output, out_gradient: Output) -> PerQuery:
    """FlashAttention-2's ``D = rowsum(do o)``: what the softmax takes off every score's
    gradient."""
    return _product("...td,...td->...t", out, out_gradient)


def attend(
    query: Query, key: Key, value: Value, mask: Mask, scale: float
) -> tuple[Output, PerQuery]:
    """What the queries get of these keys, float32 and not rounded, and the log-sum of their scores'
    exponentials: `MASK_VALUE`, or little more, where a query sees none of them.

    Args:
      query, key, value: with one dimension in front, all `alike`.
    """
    time, blocking = query.shape[-2], blocking_of(query.shape[-2], key.shape[-2], mask.causal)
    # Padded queries see nothing, and their results are cut off.
    marks = Marks(*(lengthened(x, blocking, -1) for x in mask.query))
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
    """The gradients of queries, keys and values that come through these keys, in float32.

    Args:
      log_sum: over all the keys that the softmax is taken of.
      mean: `slope_mean` of the whole result.
    """
    time, blocking = query.shape[-2], blocking_of(query.shape[-2], key.shape[-2], mask.causal)
    marks = Marks(*(lengthened(x, blocking, -1) for x in mask.query))
    query, out_gradient = (lengthened(x, blocking, -2) for x in (query, out_gradient))
    log_sum, mean = (lengthened(x, blocking, -1) for x in (log_sum, mean))
    given = query, key, value, marks, mask.key, log_sum, mean, out_gradient
    grads = _over_rows(
        partial(_row_gradient, blocking, scale, mask.window), given, _rows(query, key, blocking)
    )
    return grads[0][..., :time, :], grads[1], grads[2]


def _rows(query: Array, key: Array, blocking: Blocking) -> int:
    """How many rows are worked on at a time: a divisor, so that one program serves them all."""
    batch, kv_heads, group = query.shape[:3]
    most = max(SCORES // (kv_heads * group * blocking.queries * key.shape[2]), 1)
    return max(rows for rows in range(1, min(most, batch) + 1) if batch % rows == 0)


def _over_rows(function, given, rows: int):
    # One row at a time is no batch of one: a branch of a batch computes both sides.
    return lax.map(lambda x: function(*x), given, batch_size=rows if rows > 1 else None)


class _Softmax(NamedTuple):
    """An online softmax over some of the keys: ``out / total`` is their result, powers over ``exp
    top``."""

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
    """What the queries of one row get, and the log-sum of their scores' exponentials."""

    def softmax(query: Query, key: Key, value: Value, seen: Bool[Array, "time source"]) -> _Softmax:
        scores = _product("vgtd,vsd->vgts", query, key) * scale
        scores = jnp.where(seen[None, None], scores, MASK_VALUE)
        top = jnp.max(scores, axis=-1)
        powers = jnp.exp(scores - top[..., None])
        total = jnp.sum(powers, axis=-1)
        return _Softmax(top, total, _product("vgts,vsd->vgtd", powers.astype(value.dtype), value))

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

    # One compiled loop per span; what it knows is bound to this span, not to the last one.
    parts = []
    for span in blocking.spans:
        own = (
            blocks_of(query, span, blocking, 2),
            Marks(*(blocks_of(x, span, blocking, 0) for x in marks)),
        )
        known = keys_of(span, key, value, source_marks)
        parts.append(lax.map(lambda own, span=span, known=known: block(span, *known, *own), own))
    out, log_sum = (jnp.concatenate(part) for part in zip(*parts, strict=True))
    return joined(out), joined(log_sum)


def _merged(a: _Softmax, b: _Softmax) -> _Softmax:
    """The softmax over the keys of both."""
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
    """The gradients of one row's queries, keys and values."""
    dtype = query.dtype

    def slopes(own, key: Key, value: Value, sources: Marks) -> tuple[Array, Array, Array]:
        query, marks, log_sum, mean, out_gradient = own
        # Keys before queries: no product that follows needs a transposed copy of all scores.
        seen = jnp.swapaxes(visible(marks, sources, window), 0, 1)[None, :, None]
        scores = _product("vsd,vgtd->vsgt", key, query) * scale
        probs = jnp.where(seen, jnp.exp(scores - log_sum[:, None]), 0)
        through = _product("vsd,vgtd->vsgt", value, out_gradient) - mean[:, None]
        slopes = (probs * through * scale).astype(dtype)
        return (
            jnp.moveaxis(_product("vsd,vsgt->vdgt", key, slopes), 1, 3),
            _product("vsgt,vgtd->vsd", slopes, query),
            _product("vsgt,vgtd->vsd", probs.astype(dtype), out_gradient),
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

    # A query is in one block; a key is met by many, whose gradients add up.
    queries = []
    sums = [vary(jnp.zeros(x.shape, jnp.float32), tuple(varying(x))) for x in (key, value)]
    for span in blocking.spans:
        own = (
            blocks_of(query, span, blocking, 2),
            Marks(*(blocks_of(x, span, blocking, 0) for x in marks)),
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


def _product(formula: str, a: Array, b: Array) -> Array:
    if jax.default_backend() == "cpu":
        # XLA's CPU back end has no batched product of half precision summed in float32.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)
