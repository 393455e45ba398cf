"""Pairs of chunks of queries and keys with visible scores, for two ranks in the order of
`ZigzagLayout`; they follow from both rank indices and from the ranges of their `TokenIndices`.

A rank's part of a row is an early and a late chunk. The early chunk of an earlier rank comes before
both of them, its late chunk after both; both chunks of a later rank are between them. So of the
four pairs of chunks two may have visible scores: both chunks of queries with the early one of keys,
or the late one of queries with both of keys.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from moe.ops.mask import KeySource, Mask, SegmentMask, TokenIndices, Window, may_be_visible


class Pair(NamedTuple):
    """Queries of a section of this rank and keys of a section of another rank.

    Attributes:
      section: section of the queries.
      source: section of the keys.
      mask: mask of `query_chunks` and `key_chunks`.
      any_visible: false if none of the scores is visible; None if some certainly are.
      before: true if the rank of the keys is the earlier one; None if all chunks of queries and
        keys are used.
    """

    section: int
    source: KeySource
    mask: Mask
    any_visible: Bool[Array, ""] | None
    before: Bool[Array, ""] | None

    def query_chunks(self, x: Array, axis: int) -> Array:
        """Selects the query chunks of the two pairs that may have visible scores, from an array
        ``[row, ...]`` with time at `axis`, and stacks them along rows."""
        return x if self.before is None else _query_chunks(x, axis, self.before)

    def key_chunks(self, x: Array, axis: int) -> Array:
        """Selects the key chunks of the two pairs, as `query_chunks`."""
        return x if self.before is None else _key_chunks(x, axis, self.before)

    def query_sums(self, chunks: Array, axis: int) -> Array:
        """Gradient of `query_chunks`."""
        if self.before is None:
            return chunks
        first, second = jnp.split(chunks, 2)
        # The second is always the late chunk. The first is the early one if the keys come
        # before, else it is the late chunk again, and both gradients add up.
        early, late = jnp.where(self.before, first, 0), jnp.where(self.before, 0, first)
        return jnp.concatenate([early, second + late], axis)

    def key_sums(self, chunks: Array, axis: int) -> Array:
        """Gradient of `key_chunks`."""
        if self.before is None:
            return chunks
        first, second = jnp.split(chunks, 2)
        # The first is always the early chunk. The second is the early one again if the keys
        # come before, else it is the late chunk.
        early, late = jnp.where(self.before, second, 0), jnp.where(self.before, 0, second)
        return jnp.concatenate([first + early, late], axis)


def pairs_of(
    mask: SegmentMask, window: Window, rank: Array, source: Array, same_rank: bool
) -> list[Pair]:
    """Pairs of sections of the queries of a rank and of keys that they may attend to.

    Args:
      rank: rank of the queries along ``cp``.
      source: rank of the keys; if `same_rank` it is the same.
    """
    query_indices, key_indices = (
        mask.indices_by_section(_indices_of_rank(mask, each_rank)) for each_rank in (rank, source)
    )
    pairs = []
    for section, sources in enumerate(mask.sources):
        for key_source in sources:
            query, before = query_indices[section], None
            key = TokenIndices(*(key_source.rows(x) for x in key_indices[key_source.section]))
            # Only a rank's own keys of the same section are in the order that `Mask.causal`
            # promises.
            causal = same_rank and key_source.section == section
            # Keys of an earlier section come before all queries: no half of those scores is hidden.
            if key_source.section == section and not same_rank:
                before = source < rank
                query = TokenIndices(*(_query_chunks(x, 1, before) for x in query))
                key = TokenIndices(*(_key_chunks(x, 1, before) for x in key))
            # A query sees itself, so a causal pair needs no test.
            any_visible = None if causal else may_be_visible(query, key, window)
            pairs.append(
                Pair(section, key_source, Mask(query, key, window, causal), any_visible, before)
            )
    return pairs


def _query_chunks(x: Array, axis: int, before: Array) -> Array:
    # Two chunks of one shape whichever rank is earlier: one program for all ranks, and half of the
    # scores on each.
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([jnp.where(before, early, late), late])


def _key_chunks(x: Array, axis: int, before: Array) -> Array:
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([early, jnp.where(before, early, late)])


def _indices_of_rank(mask: SegmentMask, rank: Array) -> TokenIndices:
    """Indices of a rank's tokens. Every device has all those of `mask`: none are communicated."""
    size = mask.indices.column.shape[0] // mask.zigzag.ranks
    return TokenIndices(*(lax.dynamic_slice_in_dim(x, rank * size, size) for x in mask.indices))
