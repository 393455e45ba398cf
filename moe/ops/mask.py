"""Attention masks: a query sees earlier or equal columns of its own segment, inside a window.

A mask is a few numbers per token, of rows of queries and keys (`Mask`) or of a packed batch whose
tokens are sharded over ``cp`` (`SegmentMask`). An array of queries times keys is made only for a
block, after the ranges of these numbers show that some of the block may be visible.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped

from moe.ops.zigzag import ZigzagLayout

MAX_INDEX = 2**30
"""Larger than any column, position or segment id."""

Window = int | Int[Array, ""] | None
"""How many positions a query may look back, itself included; None is no limit."""


class TokenIndices(NamedTuple):
    """Column, position and segment id of tokens, from which masks are computed; arrays
    ``[*batch, time]``.

    Attributes:
      column: index in the row.
      position: position in the token's own sequence.
      segment: id of the sequence within the row; 0 for padding, which no query attends to.
    """

    column: Array
    position: Array
    segment: Array


@struct.dataclass
class Mask:
    """The mask of rows of queries and keys.

    Attributes:
      query: ``[batch, time]`` each.
      key: ``[batch, source]`` each.
      window: see `Window`; a number that is known only at run time is an array.
      causal: promises that the queries are the last positions of the keys, in their order, and that
        both are in the order of columns: most of the hidden scores can be skipped.
      single: promises that a row has no segments but 1 and padding.
    """

    query: TokenIndices
    key: TokenIndices
    window: Any = None  # a leaf: transformations put other things than arrays here
    causal: bool = struct.field(pytree_node=False, default=False)
    single: bool = struct.field(pytree_node=False, default=False)


def visible(
    query: TokenIndices, key: TokenIndices, window: Window = None
) -> Bool[Array, "*batch time source"]:
    """Boolean mask of the keys that each query may attend to."""
    q = TokenIndices(*(x[..., :, None] for x in query))
    k = TokenIndices(*(x[..., None, :] for x in key))
    # Columns, not positions: padding and earlier segments of the row keep their columns.
    seen = (q.column >= k.column) & (q.segment == k.segment) & (k.segment > 0)
    # Positions, not columns: padding between two tokens of a sequence is no distance.
    return seen if window is None else seen & (q.position - k.position < window)


def may_be_visible(
    query: TokenIndices, key: TokenIndices, window: Window = None
) -> Bool[Array, ""]:
    """True unless the ranges of the indices show that no key is visible to any query: False is
    certain, True is not."""
    last = jnp.max(_mask_padding(query, query.column, -1), axis=-1)
    first = jnp.min(_mask_padding(key, key.column, MAX_INDEX), axis=-1)
    possible = last >= first
    (low, high), (key_low, key_high) = (_segment_range(indices) for indices in (query, key))
    possible &= jnp.maximum(low, key_low) <= jnp.minimum(high, key_high)
    if window is not None:
        first = jnp.min(_mask_padding(query, query.position, MAX_INDEX), axis=-1)
        last = jnp.max(_mask_padding(key, key.position, -1), axis=-1)
        possible &= first - last < window
    return jnp.any(possible)


def is_fully_visible(
    query: TokenIndices, key: TokenIndices, window: Window = None
) -> Bool[Array, ""]:
    """True if the ranges of the indices show that every key is visible to every query: True is
    certain, False is not."""
    certain = jnp.min(query.column, axis=-1) >= jnp.max(key.column, axis=-1)
    segments = query.segment, key.segment
    low, key_low = (jnp.min(x, axis=-1) for x in segments)
    high, key_high = (jnp.max(x, axis=-1) for x in segments)
    certain &= (low > 0) & (low == high) & (low == key_low) & (low == key_high)
    if window is not None:
        certain &= jnp.max(query.position, axis=-1) - jnp.min(key.position, axis=-1) < window
    return jnp.all(certain)


def _mask_padding(indices: TokenIndices, x: Array, fill: int) -> Array:
    return jnp.where(indices.segment > 0, x, fill)


def _segment_range(indices: TokenIndices) -> tuple[Array, Array]:
    low = jnp.min(_mask_padding(indices, indices.segment, MAX_INDEX), axis=-1)
    return low, jnp.max(indices.segment, axis=-1)


Sections = tuple[Array, ...]


class KeySource(NamedTuple):
    """A section whose keys the queries of a section may attend to.

    Attributes:
      section: its index.
      repeats: number of consecutive rows of queries that share one of its rows.
    """

    section: int
    repeats: int

    def rows(self, x: Shaped[Array, "row *rest"]) -> Shaped[Array, "_row *rest"]:
        """Repeats each row for the rows of queries that share it."""
        return x if self.repeats == 1 else jnp.repeat(x, self.repeats, axis=0)

    def sums(self, x: Shaped[Array, "_row *rest"]) -> Shaped[Array, "row *rest"]:
        """Gradient of `rows`: the sum over the rows of queries that share a row."""
        return jnp.sum(x.reshape(-1, self.repeats, *x.shape[1:]), axis=1)


class SegmentMask(NamedTuple):
    """Causal mask within segments for a packed batch, as numbers per token (segment ids, in
    MaxText's words): no array of queries times keys is made before the ranges of these numbers show
    that some of it may be visible.

    Attributes:
      zigzag: layout of the batch's tokens.
      indices: ``[token]`` each, of all tokens of the batch.
      sources: by section, the sections that its queries may attend to, the last of them itself: the
        columns of a section follow the columns of the sections before it.
      single: a row has no segments but 1 and padding.
      window: as of `Mask`.
    """

    zigzag: ZigzagLayout
    indices: TokenIndices
    sources: tuple[tuple[KeySource, ...], ...]
    single: bool
    window: Window = None

    def key_sections(self, sections: Sections) -> Sections:
        """Keys for the queries of each section, from an array per token by section: the rows of all
        its sources, concatenated along time."""

        def concatenate(rows: list[Array]) -> Array:
            return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)

        return tuple(
            concatenate([source.rows(sections[source.section]) for source in sources])
            for sources in self.sources
        )

    def indices_by_section(self, local_indices: TokenIndices) -> tuple[TokenIndices, ...]:
        """`TokenIndices` by section, from the indices of one rank's shard of the tokens."""
        return _transpose_indices(self.zigzag.split(x) for x in local_indices)

    def full_indices(self) -> tuple[TokenIndices, ...]:
        """`TokenIndices` by section, of all ranks, in the order of columns."""
        return _transpose_indices(self.zigzag.restore(x) for x in self.indices)

    def key_indices(self, sections: tuple[TokenIndices, ...]) -> tuple[TokenIndices, ...]:
        """`key_sections` of `TokenIndices`."""
        return _transpose_indices(self.key_sections(x) for x in zip(*sections, strict=True))


def _transpose_indices(by_field) -> tuple[TokenIndices, ...]:
    """Transposes arrays by field and section to `TokenIndices` by section."""
    return tuple(TokenIndices(*fields) for fields in zip(*by_field, strict=True))
