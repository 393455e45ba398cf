"""Pairs of chunks of queries and keys with visible scores, for two ranks in the order of
`ZigzagLayout`; they follow from both rank indices and from the ranges of their marks.

A rank's part of a row is an early and a late chunk. The early chunk of an earlier rank comes before
both of them, its late chunk after both; both chunks of a later rank are between them. So of the
four pairs of chunks two may have visible scores: both chunks of queries with the early one of keys,
or the late one of queries with both of keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from moe.attention.context_parallel.mask import SegmentMask, Source
from moe.attention.mask import Marks, Mask, Window, may_meet


class Pair(NamedTuple):
    """Queries of a section of this rank and keys of a section of another rank.

    Attributes:
      section: section of the queries.
      source: section of the keys.
      mask: mask of `query_pieces` and `key_pieces`.
      meets: false if none of the scores is visible; None where some are known to be.
      before: true if the rank of the keys is the earlier one; None where queries and keys are taken
        whole.
    """

    section: int
    source: Source
    mask: Mask
    meets: Bool[Array, ""] | None
    before: Bool[Array, ""] | None

    def query_pieces(self, x: Array, axis: int) -> Array:
        """Selects the query chunks of the two pairs that may have visible scores, from an array
        ``[row, ...]`` with time at `axis`, and stacks them along rows."""
        return x if self.before is None else _query_pieces(x, axis, self.before)

    def key_pieces(self, x: Array, axis: int) -> Array:
        """Selects the key chunks of the two pairs, as `query_pieces`."""
        return x if self.before is None else _key_pieces(x, axis, self.before)

    def query_sums(self, pieces: Array, axis: int) -> Array:
        """Gradient of `query_pieces`."""
        if self.before is None:
            return pieces
        one, other = jnp.split(pieces, 2)
        # The second piece is always the late chunk. The first is the early one if the keys come
        # before, else it is the late chunk again, and both gradients add up.
        early, late = jnp.where(self.before, one, 0), jnp.where(self.before, 0, one)
        return jnp.concatenate([early, other + late], axis)

    def key_sums(self, pieces: Array, axis: int) -> Array:
        """Gradient of `key_pieces`."""
        if self.before is None:
            return pieces
        one, other = jnp.split(pieces, 2)
        # The first piece is always the early chunk. The second is the early one again if the keys
        # come before, else it is the late chunk.
        early, late = jnp.where(self.before, other, 0), jnp.where(self.before, 0, other)
        return jnp.concatenate([one + early, late], axis)


def pairs_of(
    mask: SegmentMask, window: Window, rank: Array, source: Array, own: bool
) -> list[Pair]:
    """Pairs of sections of queries of a rank and keys of another, or of the same one (`own`)."""
    of_rank, of_source = (mask.marks_of(_marks_of(mask, number)) for number in (rank, source))
    pairs = []
    for section, sources in enumerate(mask.sources):
        for other in sources:
            query, before = of_rank[section], None
            key = Marks(*(other.rows(x) for x in of_source[other.section]))
            # Only own keys of the same section are in the order that `Mask.causal` promises.
            causal = own and other.section == section
            # Keys of an earlier section come before all queries: no half of those scores is hidden.
            if other.section == section and not own:
                before = source < rank
                query = Marks(*(_query_pieces(x, 1, before) for x in query))
                key = Marks(*(_key_pieces(x, 1, before) for x in key))
            # A query sees itself, so a causal pair needs no test.
            meets = None if causal else may_meet(query, key, window)
            pairs.append(Pair(section, other, Mask(query, key, window, causal), meets, before))
    return pairs


def _query_pieces(x: Array, axis: int, before: Array) -> Array:
    # Two pieces of one shape whichever rank is earlier: one program for all ranks, and half of the
    # scores on each.
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([jnp.where(before, early, late), late])


def _key_pieces(x: Array, axis: int, before: Array) -> Array:
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([early, jnp.where(before, early, late)])


def _marks_of(mask: SegmentMask, rank: Array) -> Marks:
    """Marks of a rank's tokens. Every device has all marks of `mask`, so none are communicated."""
    size = mask.marks.column.shape[0] // mask.zigzag.ranks
    return Marks(*(lax.dynamic_slice_in_dim(x, rank * size, size) for x in mask.marks))
