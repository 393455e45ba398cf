"""How rows are cut into blocks of queries and of keys."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from moe.attention.mask import Marks

QUERIES = 128
"""Queries of a block, at most. Fewer leave out more of what a causal mask hides, more make better
products."""
KEYS = 2048
"""Keys of a block, at most."""
SPANS = 8
"""Stretches of queries that are compiled apart, at most, each with keys up to its own end."""


class Span(NamedTuple):
    """Consecutive blocks of queries that meet the same keys, the first ones of the row.

    Attributes:
      first, stop: queries.
      sources: how many keys.
    """

    first: int
    stop: int
    sources: int

    @property
    def num_chunks(self) -> int:
        """Blocks of keys."""
        return -(-self.sources // KEYS)

    @property
    def chunk(self) -> int:
        """Keys of a block."""
        return -(-self.sources // self.num_chunks)


class Blocking(NamedTuple):
    """How a row is cut into blocks.

    Attributes:
      queries: of a block.
      num_blocks: of the row.
      spans: of blocks.
    """

    queries: int
    num_blocks: int
    spans: tuple[Span, ...]

    def blocks(self, span: Span) -> slice:
        """Which of the row's blocks are those of a span."""
        return slice(span.first // self.queries, span.stop // self.queries)


def blocking_of(time: int, source: int, causal: bool) -> Blocking:
    """Blocks of equal size, in spans of equally many."""
    num_blocks = -(-time // QUERIES)
    of_span = -(-num_blocks // SPANS) if causal else num_blocks
    num_spans = -(-num_blocks // of_span)
    queries = -(-time // (num_spans * of_span))
    # Each span is a loop of its own length in keys: shapes are static, so a causal row's blocks
    # cannot each have their own.
    width = of_span * queries
    ends = [(number + 1) * width for number in range(num_spans)]
    before = source - time
    spans = tuple(
        Span(end - width, end, min(before + end, source) if causal else source) for end in ends
    )
    return Blocking(queries, num_spans * of_span, spans)


def lengthened(x: Array, blocking: Blocking, axis: int) -> Array:
    """Queries, or what belongs to them, up to a whole number of blocks; what is added is 0."""
    missing = blocking.num_blocks * blocking.queries - x.shape[axis]
    after = [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)]
    return jnp.pad(x, after)


def marks_in_blocks(marks: Marks, blocking: Blocking) -> Marks:
    """``[row, time]`` of queries to ``[row, block, query]``, padding after the last.

    Before a loop takes one row after the other: of a row that it cuts, and reads whole besides, as
    the marks of keys, XLA's CPU back end works out every number's place again for each score.
    """
    cut = (lengthened(x, blocking, -1).reshape(x.shape[0], -1, blocking.queries) for x in marks)
    return Marks(*cut)


def keys_of(span: Span, key: Array, value: Array, marks: Marks) -> tuple[Array, Array, Marks]:
    """Keys, values and marks of a span, up to a whole number of chunks; what is added is 0."""
    beyond = span.num_chunks * span.chunk - span.sources

    def of_span(x: Array, axis: int) -> Array:
        x = lax.slice_in_dim(x, 0, span.sources, axis=axis)
        return jnp.pad(x, [(0, beyond if n == axis % x.ndim else 0) for n in range(x.ndim)])

    return of_span(key, -2), of_span(value, -2), Marks(*(of_span(x, -1) for x in marks))


def chunk_of(x: Array, number: Array, span: Span, axis: int) -> Array:
    """One of the blocks of keys."""
    return lax.dynamic_slice_in_dim(x, number * span.chunk, span.chunk, axis)


def blocks_of(x: Array, span: Span, blocking: Blocking, axis: int) -> Array:
    """``[*front, time, ...]`` to ``[block, *front, query, ...]`` of a span, `axis` dimensions in
    front."""
    x = lax.slice_in_dim(x, span.first, span.stop, axis=axis)
    x = x.reshape(*x.shape[:axis], -1, blocking.queries, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def joined(x: Array) -> Array:
    """``[block, kv_head, group, query, ...]`` to ``[kv_head, group, time, ...]``."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])
