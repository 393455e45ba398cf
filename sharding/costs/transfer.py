"""Transfers: collectives with their input size per device, bytes sent and time; token dispatch."""

import functools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from sharding.compression import GROUP_TOKENS
from sharding.costs.hardware import LINK_EFFICIENCY, Hardware
from sharding.folding import Layout
from sharding.folding.mesh import atoms_of

Side = Literal["inside", "across"]
"""Side of a sequence-parallel group, ``cp x tp``, or of a server: among its ranks, or among such
groups."""
Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "permute"]
TOKENS, SUMS = "tokens to experts", "sums of experts"
FLOAT32 = INT32 = 4
FP8_BYTES, SCALE_BYTES = 1, 4
GPU_BUFFER_FACTOR = 1.5
"""Expert buffers of GPUs by default, as a multiple of balanced load. One layer of Qwen3-30B-A3B on
8 GPUs has 1.6 GiB of temporaries with them, and 5.6 with buffers for any routing."""
ROW_TILE = 32
"""Rows that expert buffers are rounded up to: the smaller tile of the grouped product "tiles"."""


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


def balanced_rows(factor: float, tokens: int, k: int, layout: Layout) -> int:
    """Rows of the expert buffers of a device, a multiple `factor` F of balanced load.

    With T tokens of a device these are ``F T k etp``, rounded up to whole tiles of `ROW_TILE` rows
    that the ``ep etp`` devices that share experts can share.
    """
    unit = math.lcm(ROW_TILE, layout.ep * layout.etp)
    # A product that is an integer up to rounding counts as that integer.
    return math.ceil(round(factor * tokens * k * layout.etp, 9) / unit) * unit


@dataclass(frozen=True)
class TokenDispatch:
    """Dispatch of a device's tokens to the devices of their experts, and combine of the outputs.

    Attributes:
      implementation: "all_gather", "all_to_all", "ragged", "two_level", "two_level_ragged", or
        "deepep", which no dispatcher here is: as "ragged", but one copy of a token crosses to a
        server, and there one goes to a device (DeepEP, HybridEP); its ids and gate weights, under a
        hundredth, are not counted.
      layout: layout of the devices.
      tokens: T, of a device.
      per_peer: R, tokens that a device sends to another where buffers are of one size.
      k: experts of a token.
      d_model: elements of a token.
      itemsize: bytes of an element of a token.
      buffer: capacity of a device in tokens, if it exchanges slices (`has_slices`); None is as
        many as are received.
      comm_dtype: communication dtype of tokens, sums and their gradients (`sharding.compression`);
        None is their own.
      num_experts: number of experts on all devices; only "deepep" needs it.
      block: neighbouring experts that a token is sent to together, for "deepep".
      server_devices: devices of a server, for two levels; None is all.
    """

    implementation: str
    layout: Layout
    tokens: int
    per_peer: int
    k: int
    d_model: int
    itemsize: int
    buffer: int | None = None
    comm_dtype: str | None = None
    num_experts: int = 0
    block: int = 1
    server_devices: int | None = None

    @property
    def has_slices(self) -> bool:
        """True if it exchanges slices of dynamic length, planned from gathered routing."""
        return self.implementation in ("ragged", "two_level_ragged")

    def transfers(self) -> tuple[list[Transfer], list[Transfer]]:
        """`token_transfers` and `routing_transfers`, forward and backward."""
        layout = self.layout
        tokens, routing = self.token_transfers(), self.routing_transfers()
        if self.comm_dtype is None:
            forward = [*tokens, *routing]
            return forward, [each.transposed(layout) for each in forward if each.gradient]
        forward = []
        backward = [each.transposed(layout) for each in routing if each.gradient]
        for transfer in tokens:
            in_slices = self.has_slices and transfer.kind == "all_to_all"
            fp8_forward, fp8_backward = to_fp8(transfer, layout, self.d_model, in_slices)
            forward += fp8_forward
            backward += fp8_backward
        return [*forward, *routing], backward

    def token_transfers(self) -> list[Transfer]:
        """Forward collectives of tokens and of sums, in the dtype of the tokens.

        With ``n = ep etp``, in tokens: "all_gather" receives ``2 T (n - 1)``, half of it sums of
        float32; "all_to_all" ``2 R (n - 1)``; "ragged" no more than ``2 T k (ep - 1) / ep`` over
        ``ep`` with even routing, and over ``etp`` its whole buffer; "two_level" over S servers of D
        devices ``2 min(T, D R) (S - 1)`` across and ``2 R S (D - 1)`` inside, and over ``etp`` as
        "all_to_all"; "two_level_ragged" no more.
        """
        layout, itemsize = self.layout, self.itemsize
        if self.implementation == "all_gather":
            group, n, size = ("ep", "etp"), layout.ep * layout.etp, self.tokens * self.d_model
            gather = Transfer(
                TOKENS, "all_gather", group, size, itemsize, gradient=FLOAT32, repeated=True
            )
            total = n * size
            return [gather, Transfer(SUMS, "reduce_scatter", group, total, FLOAT32, 1, itemsize)]
        send = partial(Transfer, itemsize=itemsize, gradient=itemsize)
        routed = (self.num_experts, self.k, self.block)
        if self.implementation != "deepep":
            routed = None
        exchanges = []
        for side, slots in self.exchanged():
            size = slots * self.d_model
            exchange = send(TOKENS, "all_to_all", ("ep",), size, repeated=True, routed=routed)
            exchanges.append(self._on_side(exchange, side))
        _, received = self._slot_counts()
        size = received * self.d_model
        return [
            *exchanges,
            send(f"{TOKENS}, over etp", "all_gather", ("etp",), size, repeated=True),
            send(f"{SUMS}, over etp", "reduce_scatter", ("etp",), layout.etp * size),
            *(replace(each, what=SUMS, repeated=False) for each in reversed(exchanges)),
        ]

    def routing_transfers(self) -> list[Transfer]:
        """Exchange of k expert ids and k gate weights of each token.

        They are sent with it, except before slices: then they are sent first and to all devices, to
        count the tokens that each will receive.
        """
        local = self.tokens * self.k
        if self.implementation == "all_gather":
            return _routing_transfers("all_gather", ("ep", "etp"), local)
        _, received = self._slot_counts()
        if self.implementation == "deepep":
            return []
        over_ep, held = [], self.tokens
        for side, slots in self.exchanged():
            kind, tokens = ("all_gather", held) if self.has_slices else ("all_to_all", slots)
            over_all = _routing_transfers(kind, ("ep",), tokens * self.k)
            over_ep += [self._on_side(each, side) for each in over_all]
            held = self.relayed
        return [*over_ep, *_routing_transfers("all_gather", ("etp",), received * self.k)]

    def exchanged(self) -> list[tuple[Side | None, int]]:
        """All-to-alls over ``ep`` in their order: the side of servers, and the tokens of a device's
        input, itself included."""
        sent, _ = self._slot_counts()
        if 1 in self.servers:
            return [(None, sent)]
        servers, devices = self.servers
        if not self.has_slices:
            return [("across", self.relayed), ("inside", sent)]
        sent_across = self.tokens * min(self.k, servers)
        sent_inside = self.relayed * min(self.k, devices)
        slots = self.layout.ep * self.per_peer
        inside = sent if self.buffer is None else min(sent_inside, slots)
        return [("across", min(sent_across, self.relayed)), ("inside", inside)]

    @property
    def servers(self) -> tuple[int, int]:
        """Servers along ``ep`` and devices of each; without two levels one of all."""
        ep = self.layout.ep
        if not self.implementation.startswith("two_level") or self.server_devices is None:
            return 1, ep
        over_ep = Transfer("", "all_to_all", ("ep",), 0, 0)
        across, inside = (self._on_side(over_ep, side) for side in ("across", "inside"))
        return across.group(self.layout), inside.group(self.layout)

    def _on_side(self, transfer: Transfer, side: Side | None) -> Transfer:
        """The transfer on a side of servers; None is over all of ``ep``."""
        if side is None:
            return transfer
        return replace(transfer, side=side, server_devices=self.server_devices)

    @property
    def relayed(self) -> int:
        """Slots for tokens that a device receives for the devices of its server; 0 without two
        levels."""
        servers, devices = self.servers
        if 1 in (servers, devices):
            return 0
        return servers * min(self.tokens, devices * self.per_peer)

    def _slot_counts(self) -> tuple[int, int]:
        """Tokens that a device sends over ``ep``, itself included, and those that it then holds."""
        slots = self.layout.ep * self.per_peer
        if not self.has_slices and self.implementation != "deepep":
            return slots, slots
        sent = min(slots, self.tokens * self.k)
        return sent, sent if self.buffer is None else self.buffer


def _routing_transfers(kind: Kind, axes: tuple[str, ...], num_values: int) -> list[Transfer]:
    ids = Transfer("ids of experts", kind, axes, num_values, INT32, repeated=True)
    return [ids, replace(ids, what="probs of experts", itemsize=FLOAT32, gradient=FLOAT32)]


def to_fp8(
    transfer: Transfer, layout: Layout, d_model: int, is_ragged: bool = False
) -> tuple[list[Transfer], list[Transfer]]:
    """FP8 form of a collective of tokens (`sharding.compression`), forward and backward.

    It sends a byte an element, and float32 scales of tokens or of groups of tokens and channels. A
    reduction is an all-to-all of terms.

    Args:
      transfer: the collective without FP8.
      d_model: elements of a token.
      is_ragged: it has slices, each of which may end in a group that is not full.
    """
    n, tokens = transfer.group(layout), transfer.elements // d_model
    forward_kind, backward_kind = "all_to_all", "all_to_all"
    if transfer.kind == "all_gather":
        forward_kind, tokens_back, blocks = "all_gather", n * tokens, n
    elif transfer.kind == "reduce_scatter":
        backward_kind, tokens_back, blocks = "all_gather", tokens // n, 1
    else:
        tokens_back, blocks = tokens, n
    groups = blocks * math.ceil(tokens_back / blocks / GROUP_TOKENS)
    if is_ragged:
        groups = tokens_back // GROUP_TOKENS + n

    def with_scales(content: Transfer, num_scales: int) -> list[Transfer]:
        what = f"scales of {content.what}"
        return [content, replace(content, what=what, elements=num_scales, itemsize=SCALE_BYTES)]

    content = replace(transfer, kind=forward_kind, itemsize=FP8_BYTES, gradient=0)
    what, elements = f"gradient of {transfer.what}", tokens_back * d_model
    gradient = replace(content, what=what, kind=backward_kind, elements=elements, repeated=False)
    return with_scales(content, tokens), with_scales(gradient, groups * d_model)
