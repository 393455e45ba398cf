"""Split of rows into blocks of queries and of keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moe.ops.mask import TokenIndices

MAX_BLOCK_QUERIES = 128
"""Queries of a block, at most. Smaller blocks skip more of what a causal mask hides; larger ones
give more efficient matrix products."""
MAX_BLOCK_KEYS = 2048
"""Keys of a block, at most."""
MAX_SPANS = 8
"""Ranges of queries that are compiled separately, at most, each with keys up to its own end."""


class Span(NamedTuple):
    """Consecutive blocks of queries that attend to the same keys: the first `sources` of the row.

    Attributes:
      first, stop: range of queries.
      sources: number of keys.
    """

    first: int
    stop: int
    sources: int

    @property
    def num_chunks(self) -> int:
        """Number of blocks of keys."""
        return -(-self.sources // MAX_BLOCK_KEYS)

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
    """

    queries: int
    num_blocks: int
    spans: tuple[Span, ...]

    def blocks(self, span: Span) -> slice:
        """Slice of the row's blocks that a span covers."""
        return slice(span.first // self.queries, span.stop // self.queries)


def blocking_of(time: int, source: int, causal: bool) -> Blocking:
    """A split into blocks of equal size, with equally many of them in each span."""
    num_blocks = -(-time // MAX_BLOCK_QUERIES)
    blocks_per_span = -(-num_blocks // MAX_SPANS) if causal else num_blocks
    num_spans = -(-num_blocks // blocks_per_span)
    queries = -(-time // (num_spans * blocks_per_span))
    # Each span is a loop with its own number of keys. Shapes are static in a loop, so the blocks of
    # a causal row cannot each have their own number.
    width = blocks_per_span * queries
    ends = [(index + 1) * width for index in range(num_spans)]
    before = source - time
    spans = tuple(
        Span(end - width, end, min(before + end, source) if causal else source) for end in ends
    )
    return Blocking(queries, num_spans * blocks_per_span, spans)


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


def blocks_of(x: Array, span: Span, blocking: Blocking, axis: int) -> Array:
    """Reshapes ``[*front, time, ...]`` to ``[block, *front, query, ...]`` for the queries of a
    span; `front` has `axis` dimensions."""
    x = lax.slice_in_dim(x, span.first, span.stop, axis=axis)
    x = x.reshape(*x.shape[:axis], -1, blocking.queries, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join_blocks(x: Array) -> Array:
    """Reshapes ``[block, kv_head, group, query, ...]`` to ``[kv_head, group, time, ...]``."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
