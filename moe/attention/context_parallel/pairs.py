"""What the queries of a rank may meet of the keys of another rank, in the order of `ZigzagLayout`:
known from the numbers of both ranks, and from the ranges of their marks.

A rank's part of a row is an early and a late chunk. The early chunk of an earlier rank comes before
both of them, its late chunk after both; both chunks of a later rank lie between them. So of the
four pairs of chunks two may meet: both chunks of queries and the early one of keys, or the late one
of queries and both of keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from moe.attention.context_parallel.mask import SegmentMask, Source
from moe.attention.mask import Marks, Mask, Window, may_meet


class Pair(NamedTuple):
    """Queries of a section of this rank and keys of a section of another.

    Attributes:
      section: of the queries.
      source: of the keys.
      mask: of `query_pieces` and `key_pieces`.
      meets: whether any of them does; None where they do.
      before: whether the rank of the keys is the earlier one; None where all are one piece.
    """

    section: int
    source: Source
    mask: Mask
    meets: Bool[Array, ""] | None
    before: Bool[Array, ""] | None

    def query_pieces(self, x: Array, axis: int) -> Array:
        """Of something per query, ``[row, ...]`` with time at `axis`, the chunks of the two pairs
        that may meet, one beneath the other."""
        return x if self.before is None else _query_pieces(x, axis, self.before)

    def key_pieces(self, x: Array, axis: int) -> Array:
        """Of something per key, as `query_pieces`."""
        return x if self.before is None else _key_pieces(x, axis, self.before)

    def query_sums(self, pieces: Array, axis: int) -> Array:
        """The gradient of `query_pieces`."""
        if self.before is None:
            return pieces
        one, other = jnp.split(pieces, 2)
        early, late = jnp.where(self.before, one, 0), jnp.where(self.before, 0, one)
        return jnp.concatenate([early, other + late], axis)

    def key_sums(self, pieces: Array, axis: int) -> Array:
        """The gradient of `key_pieces`."""
        if self.before is None:
            return pieces
        one, other = jnp.split(pieces, 2)
        early, late = jnp.where(self.before, other, 0), jnp.where(self.before, 0, other)
        return jnp.concatenate([one + early, late], axis)


def pairs_of(
    mask: SegmentMask, window: Window, rank: Array, source: Array, own: bool
) -> list[Pair]:
    """What the queries of a rank may meet of the keys of another, or of its `own`."""
    of_rank, of_source = (mask.marks_of(_marks_of(mask, number)) for number in (rank, source))
    pairs = []
    for section, sources in enumerate(mask.sources):
        for other in sources:
            query, before = of_rank[section], None
            key = Marks(*(other.rows(x) for x in of_source[other.section]))
            causal = own and other.section == section
            if other.section == section and not own:
                before = source < rank
                query = Marks(*(_query_pieces(x, 1, before) for x in query))
                key = Marks(*(_key_pieces(x, 1, before) for x in key))
            meets = None if causal else may_meet(query, key, window)
            pairs.append(Pair(section, other, Mask(query, key, window, causal), meets, before))
    return pairs


def _query_pieces(x: Array, axis: int, before: Array) -> Array:
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([jnp.where(before, early, late), late])


def _key_pieces(x: Array, axis: int, before: Array) -> Array:
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([early, jnp.where(before, early, late)])


def _marks_of(mask: SegmentMask, rank: Array) -> Marks:
    """Those of a rank's tokens: the marks of `mask` are whole on every device and do not travel."""
    size = mask.marks.column.shape[0] // mask.zigzag.ranks
    return Marks(*(lax.dynamic_slice_in_dim(x, rank * size, size) for x in mask.marks))
