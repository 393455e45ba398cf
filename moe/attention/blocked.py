"""Blockwise attention (FlashAttention in plain JAX): no more than one block of scores exists at a
time, forward or backward, and blocks that a mask hides completely are skipped.

If a mask is `causal`, about half of the work is skipped; in rows with more than `MAX_BLOCK_KEYS`
keys, also each block whose ranges of positions and segment ids show it to be hidden, for example by
a window. `attend` and `attend_gradient` work on a subset of the keys: ring attention merges their
results rank after rank.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from moe.ops.attention import Flash, Key, Output, PerQuery, Query, Value, product
from moe.ops.mask import Mask, TokenIndices, Window, may_be_visible, visible
from moe.ops.precision import MASK_VALUE
from sharding.collectives import match_varying

MAX_BLOCK_QUERIES = 128
"""Queries of a block, at most. Smaller blocks skip more of what a causal mask hides; larger ones
give more efficient matrix products."""
MAX_BLOCK_KEYS = 2048
"""Keys of a block, at most."""
MAX_SPANS = 8
"""Ranges of queries that are compiled separately, at most, each with keys up to its own end."""

MAX_BLOCK_SCORES = 2**18
"""Scores of a block of multiple short rows, at most: about as many as a core's cache holds."""


class BlockSizes(NamedTuple):
    """Sizes of blocks, at most: see `MAX_BLOCK_QUERIES`, `MAX_BLOCK_KEYS`, `MAX_BLOCK_SCORES`."""

    queries: int
    keys: int
    scores: int


GPU_SIZES = BlockSizes(512, 4096, 2**26)
"""Sizes for GPUs, which launch several kernels for each block: up to 256 MiB of scores for 32
heads."""


class Span(NamedTuple):
    """Consecutive blocks of queries that attend to the same keys: the first `sources` of the row.

    Attributes:
      first, stop: range of queries.
      sources: number of keys.
      most: number of keys of a block, at most.
    """

    first: int
    stop: int
    sources: int
    most: int

    @property
    def num_chunks(self) -> int:
        """Number of blocks of keys."""
        return -(-self.sources // self.most)

    @property
    def chunk(self) -> int:
        """Number of keys of a block."""
        return -(-self.sources // self.num_chunks)


class Blocking(NamedTuple):
    """Split of a row into blocks.

    Attributes:
      queries: number of queries of a block.
      num_blocks: number of blocks of queries of the row.
      spans: ranges of these blocks, in order.
      scores: number of scores of multiple short rows, at most.
    """

    queries: int
    num_blocks: int
    spans: tuple[Span, ...]
    scores: int

    def blocks(self, span: Span) -> slice:
        """Slice of the row's blocks that a span covers."""
        return slice(span.first // self.queries, span.stop // self.queries)


def blocking_of(time: int, source: int, causal: bool, sizes: BlockSizes | None = None) -> Blocking:
    """A split into blocks of equal size, with equally many of them in each span; sizes of None are
    those for a CPU."""
    sizes = sizes or BlockSizes(MAX_BLOCK_QUERIES, MAX_BLOCK_KEYS, MAX_BLOCK_SCORES)
    num_blocks = -(-time // sizes.queries)
    blocks_per_span = -(-num_blocks // MAX_SPANS) if causal else num_blocks
    num_spans = -(-num_blocks // blocks_per_span)
    queries = -(-time // (num_spans * blocks_per_span))
    # Each span is a loop with its own number of keys. Shapes are static in a loop, so the blocks of
    # a causal row cannot each have their own number.
    width = blocks_per_span * queries
    ends = [(index + 1) * width for index in range(num_spans)]
    before = source - time
    spans = tuple(
        Span(end - width, end, min(before + end, source) if causal else source, sizes.keys)
        for end in ends
    )
    return Blocking(queries, num_spans * blocks_per_span, spans, sizes.scores)


def pad_to_blocks(x: Array, blocking: Blocking, axis: int) -> Array:
    """Queries, or an array per query, padded with zeros to a whole number of blocks."""
    missing = blocking.num_blocks * blocking.queries - x.shape[axis]
    after = [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)]
    return jnp.pad(x, after)


def split_indices(indices: TokenIndices, blocking: Blocking) -> TokenIndices:
    """Reshapes ``[row, time]`` of queries to ``[row, block, query]``, with padding after the last.

    It is done before a loop takes one row after the other. If the loop split a row that it also
    reads whole, as the indices of keys, XLA's CPU back end would compute the index of every element
    again for each score.
    """
    blocks = (
        pad_to_blocks(x, blocking, -1).reshape(x.shape[0], -1, blocking.queries) for x in indices
    )
    return TokenIndices(*blocks)


def keys_of(
    span: Span, key: Array, value: Array, indices: TokenIndices
) -> tuple[Array, Array, TokenIndices]:
    """Keys, values and token indices of a span, padded with zeros to a whole number of chunks."""
    beyond = span.num_chunks * span.chunk - span.sources

    def of_span(x: Array, axis: int) -> Array:
        x = lax.slice_in_dim(x, 0, span.sources, axis=axis)
        return jnp.pad(x, [(0, beyond if n == axis % x.ndim else 0) for n in range(x.ndim)])

    return of_span(key, -2), of_span(value, -2), TokenIndices(*(of_span(x, -1) for x in indices))


def chunk_of(x: Array, chunk_index: Array, span: Span, axis: int) -> Array:
    """Slice of one block of keys."""
    return lax.dynamic_slice_in_dim(x, chunk_index * span.chunk, span.chunk, axis)


def blocks_of(x: Array, span: Span, blocking: Blocking) -> Array:
    """Reshapes ``[kv_head, group, time, ...]`` to ``[block, kv_head, group, query, ...]`` for the
    queries of a span."""
    x = lax.slice_in_dim(x, span.first, span.stop, axis=2)
    x = x.reshape(*x.shape[:2], -1, blocking.queries, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)


def join_blocks(x: Array) -> Array:
    """Reshapes ``[block, kv_head, group, query, ...]`` to ``[kv_head, group, time, ...]``."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def attend(
    query: Query,
    key: Key,
    value: Value,
    mask: Mask,
    scale: float,
    sizes: BlockSizes | None = None,
) -> tuple[Output, PerQuery]:
    """Attention output over these keys, float32 and not rounded, and the log-sum-exp of the scores:
    `MASK_VALUE`, or little more, if a query sees none of them.

    Args:
      query, key, value: with one batch dimension in front, all varying over the same mesh axes
        (`sharding.collectives.match_varying`).
      sizes: sizes of blocks; None is those for a CPU.
    """
    time, source = query.shape[-2], key.shape[-2]
    blocking = blocking_of(time, source, mask.causal, sizes)
    # Padded queries see nothing, and their results are cut off.
    indices = _RowIndices(split_indices(mask.query, blocking), mask.key)
    arrays = pad_to_blocks(query, blocking, -2), key, value, indices
    attend_row = partial(_attend_row, _Shared(blocking, scale, mask.window))
    out, log_sum = _map_rows(attend_row, arrays, _rows_per_step(query, key, blocking))
    return out[..., :time, :], log_sum[..., :time]


def attend_gradient(
    query: Query,
    key: Key,
    value: Value,
    mask: Mask,
    log_sum: PerQuery,
    softmax_d: PerQuery,
    out_gradient: Output,
    scale: float,
    sizes: BlockSizes | None = None,
) -> tuple[Query, Key, Value]:
    """Gradients of queries, keys and values from the scores with these keys, in float32.

    Args:
      log_sum: log-sum-exp over all the keys of the softmax, not these alone.
      softmax_d: `moe.ops.attention.dot_do_o` of the output over all keys.
    """
    time, source = query.shape[-2], key.shape[-2]
    blocking = blocking_of(time, source, mask.causal, sizes)
    indices = _RowIndices(split_indices(mask.query, blocking), mask.key)
    query, out_gradient = (pad_to_blocks(x, blocking, -2) for x in (query, out_gradient))
    log_sum, softmax_d = (pad_to_blocks(x, blocking, -1) for x in (log_sum, softmax_d))
    arrays = query, key, value, indices, log_sum, softmax_d, out_gradient
    gradient = partial(_attend_row_gradient, _Shared(blocking, scale, mask.window))
    grads = _map_rows(gradient, arrays, _rows_per_step(query, key, blocking))
    return grads[0][..., :time, :], grads[1], grads[2]


BLOCKED = Flash(attend, attend_gradient)
"""The implementation for `moe.ops.attention.flash_attention`."""
BLOCKED_ON_GPU = Flash(partial(attend, sizes=GPU_SIZES), partial(attend_gradient, sizes=GPU_SIZES))
"""The same for GPUs."""


class _Shared(NamedTuple):
    """Settings of all rows: their blocks, the factor of the scores, and the window."""

    blocking: Blocking
    scale: float
    window: Window


class _RowIndices(NamedTuple):
    """`TokenIndices` of a row: of its blocks of queries (`split_indices`), and of its keys."""

    query: TokenIndices
    key: TokenIndices


def _rows_per_step(query: Array, key: Array, blocking: Blocking) -> int:
    """Number of rows per loop iteration: a divisor of the batch, so that one compiled body does."""
    batch, kv_heads, group = query.shape[:3]
    max_rows = max(blocking.scores // (kv_heads * group * blocking.queries * key.shape[2]), 1)
    return max(rows for rows in range(1, min(max_rows, batch) + 1) if batch % rows == 0)


def _map_rows(function, arrays, rows: int):
    # One row at a time is not a batch of one: under `vmap` a `cond` computes both branches.
    return lax.map(lambda x: function(*x), arrays, batch_size=rows if rows > 1 else None)


class _Softmax(NamedTuple):
    """State of an online softmax over a subset of the keys.

    The output is ``out / total``; exponentials are relative to ``exp(top)``.
    """

    top: Array
    total: Array
    out: Array


def _attend_row(
    shared: _Shared,
    query: Query,
    key: Key,
    value: Value,
    row_indices: _RowIndices,
) -> tuple[Output, PerQuery]:
    """Attention output of one row's queries, and the log-sum-exp of their scores."""
    blocking, scale, window = shared

    def softmax(query: Query, key: Key, value: Value, seen: Bool[Array, "time source"]) -> _Softmax:
        scores = product("vgtd,vsd->vgts", query, key) * scale
        scores = jnp.where(seen[None, None], scores, MASK_VALUE)
        top = jnp.max(scores, axis=-1)
        powers = jnp.exp(scores - top[..., None])
        total = jnp.sum(powers, axis=-1)
        return _Softmax(top, total, product("vgts,vsd->vgtd", powers.astype(value.dtype), value))

    def block(
        span: Span,
        key: Key,
        value: Value,
        key_indices: TokenIndices,
        query: Query,
        indices: TokenIndices,
    ):
        if span.num_chunks == 1:
            state = softmax(query, key, value, visible(indices, key_indices, window))
            return state.out / state.total[..., None], state.top + jnp.log(state.total)

        def add(chunk_index: Array, state: _Softmax) -> _Softmax:
            chunk_indices = TokenIndices(*(chunk_of(x, chunk_index, span, -1) for x in key_indices))

            def add_chunk(state: _Softmax) -> _Softmax:
                keys, values = (chunk_of(x, chunk_index, span, -2) for x in (key, value))
                seen = visible(indices, chunk_indices, window)
                return _merge(state, softmax(query, keys, values, seen))

            return lax.cond(
                may_be_visible(indices, chunk_indices, window), add_chunk, lambda x: x, state
            )

        zeros = jnp.zeros((*query.shape[:-1], value.shape[-1]), jnp.float32)
        start = _Softmax(zeros[..., 0] + MASK_VALUE, zeros[..., 0], zeros)
        start = match_varying(start, query)
        state = lax.fori_loop(0, span.num_chunks, add, start)
        total = jnp.where(state.total == 0, 1, state.total)
        return state.out / total[..., None], state.top + jnp.log(total)

    # One compiled loop per span, as shapes differ.
    outputs = []
    for span in blocking.spans:
        query_blocks = (
            blocks_of(query, span, blocking),
            TokenIndices(*(x[blocking.blocks(span)] for x in row_indices.query)),
        )
        span_keys = keys_of(span, key, value, row_indices.key)
        of_span = partial(block, span, *span_keys)
        outputs.append(lax.map(lambda blocks, of_span=of_span: of_span(*blocks), query_blocks))
    out, log_sum = (jnp.concatenate(output) for output in zip(*outputs, strict=True))
    return join_blocks(out), join_blocks(log_sum)


def _merge(a: _Softmax, b: _Softmax) -> _Softmax:
    """Combines two online softmax states into one over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    total = a.total * of_a + b.total * of_b
    return _Softmax(top, total, a.out * of_a[..., None] + b.out * of_b[..., None])


def _attend_row_gradient(
    shared: _Shared,
    query: Query,
    key: Key,
    value: Value,
    row_indices: _RowIndices,
    log_sum: PerQuery,
    softmax_d: PerQuery,
    out_gradient: Output,
) -> tuple[Query, Key, Value]:
    """Gradients of one row's queries, keys and values."""
    (blocking, scale, window), dtype = shared, query.dtype

    def block_gradients(
        query_block, key: Key, value: Value, key_indices: TokenIndices
    ) -> tuple[Array, Array, Array]:
        query, indices, log_sum, softmax_d, out_gradient = query_block
        # Keys before queries: none of the following products needs a transposed copy of the scores.
        seen = jnp.swapaxes(visible(indices, key_indices, window), 0, 1)[None, :, None]
        scores = product("vsd,vgtd->vsgt", key, query) * scale
        probs = jnp.where(seen, jnp.exp(scores - log_sum[:, None]), 0)
        prob_gradients = product("vsd,vgtd->vsgt", value, out_gradient) - softmax_d[:, None]
        score_gradients = (probs * prob_gradients * scale).astype(dtype)
        return (
            jnp.moveaxis(product("vsd,vsgt->vdgt", key, score_gradients), 1, 3),
            product("vsgt,vgtd->vsd", score_gradients, query),
            product("vsgt,vgtd->vsd", probs.astype(dtype), out_gradient),
        )

    def block(span: Span, key: Key, value: Value, key_indices: TokenIndices, sums, query_block):
        if span.num_chunks == 1:
            query_gradient, *key_gradients = block_gradients(query_block, key, value, key_indices)
            return tuple(a + b for a, b in zip(sums, key_gradients, strict=True)), query_gradient

        def add(chunk_index: Array, sums):
            chunk_indices = TokenIndices(*(chunk_of(x, chunk_index, span, -1) for x in key_indices))
            keys, values = (chunk_of(x, chunk_index, span, -2) for x in (key, value))

            def hidden():
                shapes = query_block[0].shape, keys.shape, values.shape
                zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
                return match_varying(zeros, query_block[0])

            possible = may_be_visible(query_block[1], chunk_indices, window)
            query_gradient, *key_gradients = lax.cond(
                possible, lambda: block_gradients(query_block, keys, values, chunk_indices), hidden
            )

            def add_to(total: Array, new: Array) -> Array:
                new = chunk_of(total, chunk_index, span, -2) + new
                return lax.dynamic_update_slice_in_dim(total, new, chunk_index * span.chunk, -2)

            added = map(add_to, sums[1:], key_gradients)
            return sums[0] + query_gradient, *added

        query_gradient = match_varying(jnp.zeros(query_block[0].shape, jnp.float32), query_block[0])
        query_gradient, *sums = lax.fori_loop(0, span.num_chunks, add, (query_gradient, *sums))
        return tuple(sums), query_gradient

    # A query is in one block. A key is in the scores of many blocks, whose gradients are summed.
    queries = []
    sums = [match_varying(jnp.zeros(x.shape, jnp.float32), x) for x in (key, value)]
    for span in blocking.spans:
        query_blocks = (
            blocks_of(query, span, blocking),
            TokenIndices(*(x[blocking.blocks(span)] for x in row_indices.query)),
            *(blocks_of(x, span, blocking) for x in (log_sum, softmax_d, out_gradient)),
        )
        span_keys = keys_of(span, key, value, row_indices.key)
        so_far = keys_of(span, sums[0], sums[1], row_indices.key)[:2]
        of_span = partial(block, span, *span_keys)
        key_gradients, query_gradient = lax.scan(of_span, so_far, query_blocks)
        queries.append(query_gradient)
        sums = [
            total.at[:, : span.sources].set(new[:, : span.sources])
            for total, new in zip(sums, key_gradients, strict=True)
        ]
    return join_blocks(jnp.concatenate(queries)), sums[0], sums[1]
