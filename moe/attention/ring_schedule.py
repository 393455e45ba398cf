"""Schedule of ring attention: the rank whose keys are on a device at each hop, and the pairs of
chunks of queries and keys whose scores may be visible then.

A hop moves the shard of keys and values of a device to another one; after ``cp - 1`` hops every
device has seen all shards once. `Ring` hops by collective-permutes and `Exchange`, in the order of
a Gray code, by collectives over groups:

* A collective-permute is one operation of *all* devices of the compiled program, those outside its
  pairs included. All of them must execute it.
* A pipeline stage skips layers that it does not have (`sharding.pipeline`), so that inside a chunk
  of layers only the devices of that stage execute an operation. A collective over groups waits for
  the devices of its group alone, and a group never spans stages.

A rank's part of a row is an early and a late chunk (`ZigzagLayout`). The early chunk of an earlier
rank comes before both of them, its late chunk after both; both chunks of a later rank are between
them. So of the four pairs of chunks two may have visible scores: both chunks of queries with the
early one of keys, or the late one of queries with both of keys. The pairs follow from both rank
indices and from the ranges of their `TokenIndices`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from moe.ops.mask import KeySource, Mask, SegmentMask, TokenIndices, may_be_visible
from sharding.collectives import Axes, digit_neighbour, shift
from sharding.folding import FoldedMesh
from sharding.folding.layout import prime_factors

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Ring:
    """One device further at each hop, by collective-permutes between neighbours.

    Attributes:
      axes: axes of ``cp``.
      ranks: devices along them.
    """

    axes: Axes
    ranks: int

    def source(self, rank: Int[Array, ""], hop: Any) -> Int[Array, ""]:
        """The rank whose shard is on the device `rank` after `hop` hops."""
        return (rank - hop) % self.ranks

    def send(self, x: Array, hop: Any) -> Array:
        """Sends `x` along the hop that follows the first `hop` hops. After ``cp`` hops every shard
        is back on its own device.

        Volume sent: the array.
        """
        return shift(x, self.axes)

    def loop(self, visit: Callable[[Carry, Any], Carry], carry: Carry) -> Carry:
        """Calls `visit` after each hop but the last, which is left to the caller."""
        # A scan, as all hops are the same permute: the program holds one body for any `cp`.
        if self.ranks > 2:
            carry, _ = lax.scan(
                lambda carry, hop: (visit(carry, hop), None), carry, jnp.arange(1, self.ranks - 1)
            )
        return carry


@dataclass(frozen=True)
class Exchange:
    """Hops in the order of a modular Gray code: each moves shards along one digit of the rank.

    The bases of the digits are the prime factors of ``cp``. If they are twos, the usual case, a hop
    swaps the shards of two devices and sends as much as a ring's hop. A digit of base ``p`` is an
    all-gather over ``p`` devices, of which one shard is used: ``p - 1`` times as much. The hops
    differ, so that a compiled program contains each of them.
    """

    axes: Axes
    ranks: int

    @cached_property
    def radices(self) -> tuple[int, ...]:
        """Bases of the digits, the lowest first. The lowest digit moves in most hops, and the
        smallest base costs least."""
        return prime_factors(self.ranks)

    def code(self, hop: int) -> list[int]:
        """Word number `hop` of the modular Gray code, lowest digit first."""
        # A digit minus the number above it: counting up by one then changes a single digit of the
        # word. When a digit wraps, the number above it rises too, and the difference is the same.
        digits, rest = [], hop
        for radix in self.radices:
            rest, digit = divmod(rest, radix)
            digits.append((digit - rest) % radix)
        return digits

    def source(self, rank: Int[Array, ""], hop: int) -> Int[Array, ""]:
        # Digit by digit the shard has moved up by the code word, so its rank is that much lower.
        source_rank, stride = jnp.zeros_like(rank), 1
        for radix, moved in zip(self.radices, self.code(hop), strict=True):
            source_rank += (rank // stride - moved) % radix * stride
            stride *= radix
        return source_rank

    def send(self, x: Array, hop: int) -> Array:
        """Sends `x` along a hop, as `Ring.send`.

        Volume received: ``p - 1`` times the array for each digit that moves: one digit in a hop,
        and in the hop back to the shard's own device those in which the last word is not zero.
        """
        before, after = self.code(hop), self.code((hop + 1) % self.ranks)
        stride = 1
        for radix, old, new in zip(self.radices, before, after, strict=True):
            if old != new:
                x = digit_neighbour(x, self.axes, radix, stride, (new - old) % radix)
            stride *= radix
        return x

    def loop(self, visit: Callable[[Carry, int], Carry], carry: Carry) -> Carry:
        # Unrolled: the groups of a collective are static, and each hop has other ones.
        for hop in range(1, self.ranks - 1):
            carry = visit(carry, hop)
        return carry


def hops_of(mesh: FoldedMesh) -> Ring | Exchange:
    """Order of hops along ``cp``: permutes if all devices run the same layers at the same time,
    exchanges under pipeline parallelism."""
    order = Ring if mesh.layout.pp == 1 else Exchange
    return order(mesh.cp, mesh.size(mesh.cp))


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
        return _query_chunks(x, axis, self.before)

    def key_chunks(self, x: Array, axis: int) -> Array:
        """Selects the key chunks of the two pairs, as `query_chunks`."""
        return _key_chunks(x, axis, self.before)

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


def pairs_of(mask: SegmentMask, rank: Array, source: Array, same_rank: bool) -> list[Pair]:
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
            # Only a rank's own keys of the same section are in the order that `Mask.causal`
            # promises.
            causal = same_rank and key_source.section == section
            # Keys of an earlier section come before all queries: no half of those scores is hidden.
            halved = key_source.section == section and not same_rank
            before = source < rank if halved else None
            keys = (key_source.rows(x) for x in key_indices[key_source.section])
            query = TokenIndices(*(_query_chunks(x, 1, before) for x in query_indices[section]))
            key = TokenIndices(*(_key_chunks(x, 1, before) for x in keys))
            # A query sees itself, so a causal pair needs no test.
            any_visible = None if causal else may_be_visible(query, key, mask.window)
            pair_mask = Mask(query, key, mask.window, causal)
            pairs.append(Pair(section, key_source, pair_mask, any_visible, before))
    return pairs


def _query_chunks(x: Array, axis: int, before: Array | None) -> Array:
    if before is None:
        return x
    # Two chunks of one shape whichever rank is earlier: one program for all ranks, and half of the
    # scores on each.
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([jnp.where(before, early, late), late])


def _key_chunks(x: Array, axis: int, before: Array | None) -> Array:
    if before is None:
        return x
    early, late = jnp.split(x, 2, axis)
    return jnp.concatenate([early, jnp.where(before, early, late)])


def _indices_of_rank(mask: SegmentMask, rank: Array) -> TokenIndices:
    """Indices of a rank's tokens. Every device has all indices of `mask`: none are communicated."""
    size = mask.indices.column.shape[0] // mask.zigzag.ranks
    return TokenIndices(*(lax.dynamic_slice_in_dim(x, rank * size, size) for x in mask.indices))
