"""Orders in which the keys and values of every rank of ``cp`` visit each of its devices.

A hop moves what a device holds to another one; after ``cp - 1`` hops every device has seen all
shards once. `Ring` hops by collective-permutes and `Exchange` by collectives over groups:

* A collective-permute is one operation of *all* devices of the program, those outside its pairs
  included. It may stand only where they all come by.
* A stage of a pipeline leaves work out that it does not have (`sharding.pipeline`), so that inside
  a chunk of layers only the devices of that stage come by. A collective over groups waits for the
  devices of its group alone, and a group never spans stages.
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
        """The hop after the first `hop` hops; after all of them every shard is at home again.

        Volume sent: the array.
        """
        return shift(x, self.axes)

    def loop(self, visit: Callable[[Carry, Any], Carry], carry: Carry) -> Carry:
        """`visit` after each hop but the last, which is left to the caller."""
        if self.ranks > 2:
            carry, _ = lax.scan(
                lambda carry, hop: (visit(carry, hop), None), carry, jnp.arange(1, self.ranks - 1)
            )
        return carry


@dataclass(frozen=True)
class Exchange:
    """The order of a modular Gray code: each hop moves shards along one digit of the rank.

    The digits are those of the prime factors of ``cp``. Where they are twos, which is the usual
    case, a hop swaps the shards of two devices and sends as much as a ring's hop. A digit of base
    ``p`` is an all-gather of ``p`` devices, of which one shard is used: ``p - 1`` times as much.
    The hops differ, so that a program has the code of each of them.
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
        digits, rest = [], hop
        for radix in self.radices:
            rest, digit = divmod(rest, radix)
            digits.append((digit - rest) % radix)
        return digits

    def source(self, rank: Int[Array, ""], hop: int) -> Int[Array, ""]:
        found, stride = jnp.zeros_like(rank), 1
        for radix, moved in zip(self.radices, self.code(hop), strict=True):
            found += (rank // stride - moved) % radix * stride
            stride *= radix
        return found

    def send(self, x: Array, hop: int) -> Array:
        """As `Ring.send`. Volume received: ``p - 1`` times the array for each digit that moves: one
        in a hop, and on the way home those in which the last word is not zero."""
        before, after = self.code(hop), self.code((hop + 1) % self.ranks)
        stride = 1
        for radix, old, new in zip(self.radices, before, after, strict=True):
            if old != new:
                x = digit_neighbour(x, self.axes, radix, stride, (new - old) % radix)
            stride *= radix
        return x

    def loop(self, visit: Callable[[Carry, int], Carry], carry: Carry) -> Carry:
        for hop in range(1, self.ranks - 1):
            carry = visit(carry, hop)
        return carry


def hops_of(mesh: FoldedMesh) -> Ring | Exchange:
    """The order of hops along ``cp``: permutes where all devices run the same layers at the same
    time, exchanges under a pipeline."""
    order = Ring if mesh.layout.pp == 1 else Exchange
    return order(mesh.cp, mesh.size(mesh.cp))
