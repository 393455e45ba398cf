"""Orders in which the keys and values of every ``cp`` rank visit each device: a ring, or a Gray
code.

A hop moves the shard of a device to another one; after ``cp - 1`` hops every device has seen all
shards once. `Ring` hops by collective-permutes and `Exchange` by collectives over groups:

* A collective-permute is one operation of *all* devices of the compiled program, those outside its
  pairs included. All of them must execute it.
* A pipeline stage skips layers that it does not have (`sharding.pipeline`), so that inside a chunk
  of layers only the devices of that stage execute an operation. A collective over groups waits for
  the devices of its group alone, and a group never spans stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from sharding.collectives import Axes, digit_neighbour, shift
from sharding.folding import FoldedMesh
from sharding.folding.layout import prime_factors

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Ring:
    """One device further at each hop, by collective-permutes between neighbours.

    Attributes:
      axes: of ``cp``.
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

    The bases of the digits are the prime factors of ``cp``. Where they are twos, which is the usual
    case, a hop swaps the shards of two devices and sends as much as a ring's hop. A digit of base
    ``p`` is an all-gather over ``p`` devices, of which one shard is used: ``p - 1`` times as much.
    The hops differ, so that a compiled program contains each of them.
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
        # word. Where a digit wraps, the number above it rises too, and the difference is the same.
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
    """Order of hops along ``cp``: permutes where all devices run the same layers at the same time,
    exchanges under pipeline parallelism."""
    order = Ring if mesh.layout.pp == 1 else Exchange
    return order(mesh.cp, mesh.size(mesh.cp))
