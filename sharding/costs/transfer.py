"""Transfer: a collective with its input size per device, the bytes it sends and its time."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

from sharding.costs.hardware import LINK_EFFICIENCY, Hardware
from sharding.folding import Layout
from sharding.folding.mesh import atoms_of

Side = Literal["inside", "across"]
"""Side of a sequence-parallel group, ``cp x tp``, or of a server: among its ranks, or among such
groups."""
Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "permute"]


@dataclass(frozen=True)
class Transfer:
    """A collective over logical axes, with the number of its calls.

    Attributes:
      what: description in words.
      kind: kind of collective.
      axes: logical axes of the layout that its groups span.
      side: its groups span only that part of the axes; None is all of it.
      server_devices: devices of a server, of which `side` is; None is a sequence-parallel group.
      routed: (experts, k, block) of an all-to-all whose elements are k copies of each token, if it
        sends one copy to a domain and there one to a device (`mean_destinations`); None sends all.
      elements: elements of the input array of each device.
      itemsize: bytes of an element.
      times: number of calls.
      gradient: bytes of an element that its transpose sends in the backward pass; 0 is no gradient.
      repeated: the backward pass repeats it under rematerialisation (`Method.repeats`).
    """

    what: str
    kind: Kind
    axes: tuple[str, ...]
    elements: int
    itemsize: int
    times: int = 1
    gradient: int = 0
    repeated: bool = False
    side: Side | None = None
    routed: tuple[int, int, int] | None = None
    server_devices: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of a device's input, over all calls."""
        return self.elements * self.itemsize * self.times

    def group(self, layout: Layout) -> int:
        """Devices of a group."""
        if self.side is None:
            return math.prod(getattr(layout, axis) for axis in self.axes)
        return math.prod(size for _, size in self.strides(layout))

    def strides(self, layout: Layout) -> list[tuple[int, int]]:
        """Strides and sizes of its groups (`group_strides`)."""
        return group_strides(self.axes, self.side, layout, self.server_devices)

    def sent(self, layout: Layout) -> float:
        """Bytes that a device sends, with ring algorithms.

        They are its input times n - 1 (all-gather), (n - 1) / n (reduce-scatter, all-to-all), twice
        that (all-reduce), or 1 (permute).
        """
        n = self.group(layout)
        if self.routed is not None:
            return self.bytes * mean_destinations(*self.routed, n) / self.routed[1] * (n - 1) / n
        share = {
            "all_gather": n - 1.0,
            "reduce_scatter": (n - 1) / n,
            "all_to_all": (n - 1) / n,
            "all_reduce": 2 * (n - 1) / n,
            "permute": float(n > 1),
        }
        return self.bytes * share[self.kind]

    def transposed(self, layout: Layout) -> "Transfer":
        """Transpose, the collective of its gradient.

        It is an all-gather for a reduce-scatter and the reverse; any other is its own transpose.
        """
        kind, elements = self.kind, self.elements
        if kind == "all_gather":
            kind, elements = "reduce_scatter", elements * self.group(layout)
        elif kind == "reduce_scatter":
            kind, elements = "all_gather", elements // self.group(layout)
        what = f"gradient of {self.what}"
        return replace(self, what=what, kind=kind, elements=elements, itemsize=self.gradient)

    def members_in_domain(self, layout: Layout, hardware: Hardware) -> int:
        """Members of a group in one fast domain."""
        groups = self.strides(layout)
        return math.prod(max(1, min(size, hardware.domain // stride)) for stride, size in groups)

    def seconds(self, layout: Layout, hardware: Hardware) -> float:
        """Seconds of the collective, over all times that it happens.

        A ring over multiple domains leaves each through the adapters of all its members there, so
        its rate is the smaller of a fast link's and the sum of theirs. An all-to-all sends to each
        member separately, at `Hardware.exchange` of the links' rates; data inside and outside of a
        domain is sent simultaneously. With `routed` the adapters carry one copy of a token for each
        domain with experts of it, and the fast links one for each device. A permute is as slow as
        its slowest hop.
        """
        n, near = self.group(layout), self.members_in_domain(layout, hardware)
        if n == 1:
            return 0.0
        inside, outside = hardware.inside * LINK_EFFICIENCY, hardware.outside * LINK_EFFICIENCY
        slowest, latency = outside, self.times * hardware.latency_outside
        if near == n:
            slowest, latency = inside, self.times * hardware.latency_inside
        if self.kind == "permute":
            return self.bytes / slowest + latency
        if self.kind == "all_to_all":
            if self.routed is None:
                to_one = self.bytes / n / hardware.exchange
                return max(to_one * (near - 1) / inside, to_one * (n - near) / outside) + latency
            share = self.bytes / self.routed[1]
            to_devices = share * mean_destinations(*self.routed, n) * (near - 1) / near
            to_domains = share * mean_destinations(*self.routed, n // near) * (1 - near / n)
            return max(to_devices / inside, to_domains / outside) + latency
        rate = inside if near == n else min(inside, near * outside)
        hops = n - 1 if near == n else n - n // near
        latency = hops * hardware.latency_inside
        if near < n:
            latency += n // near * hardware.latency_outside
        if self.kind == "all_reduce":
            latency *= 2
        return self.sent(layout) / rate + self.times * latency


@functools.lru_cache(maxsize=1024)
def mean_destinations(experts: int, k: int, block: int, groups: int) -> float:
    """Mean number of groups with experts of a token, if all sets of k experts are equally likely.

    ``n (1 - C(E - E / n, k) / C(E, k))`` of n groups (devices, domains) with E / n experts each.

    Args:
      block: experts that are chosen together, neighbours; 1 chooses each by itself.
    """
    blocks, chosen = experts // block, max(1, k // block)
    # A block may cover more than one group.
    per_group = blocks // min(groups, blocks)
    absent = math.comb(blocks - per_group, chosen) / math.comb(blocks, chosen)
    return groups * (1 - absent)


_atoms_of = functools.lru_cache(maxsize=64)(atoms_of)


@functools.lru_cache(maxsize=8192)
def group_strides(
    axes: tuple[str, ...], side: Side | None, layout: Layout, server_devices: int | None = None
) -> list[tuple[int, int]]:
    """Strides and sizes of groups over logical axes, as (ranks between neighbours, number of them).

    The smallest stride comes first.

    Args:
      server_devices: devices of a server, of which `side` is; None is a sequence-parallel group.
    """
    if server_devices is not None:
        parts = []
        for stride, size in group_strides(axes, None, layout):
            inside = max(1, min(size, server_devices // stride))
            across = stride * inside, size // inside
            parts.append((stride, inside) if side == "inside" else across)
        return parts
    groups: list[tuple[int, int]] = []
    stride = 1
    for atom in reversed(_atoms_of(layout)):
        is_inside = "cp" in atom.owners or "tp" in atom.owners
        on_side = side is None or is_inside == (side == "inside")
        if atom.size > 1 and on_side and set(axes) & set(atom.owners):
            step, size = groups[-1] if groups else (stride, 1)
            if step * size == stride:
                groups[-1:] = [(step, size * atom.size)]
            else:
                groups.append((stride, atom.size))
        stride *= atom.size
    return groups
