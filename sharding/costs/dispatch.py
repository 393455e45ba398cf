"""Collectives of token dispatch to the experts and back, with the routing that goes along."""

import math
from dataclasses import dataclass, replace
from functools import partial

from sharding.compression import GROUP_TOKENS
from sharding.costs.transfer import Kind, Side, Transfer
from sharding.folding import Layout

TOKENS, SUMS = "tokens to experts", "sums of experts"
FLOAT32 = INT32 = 4
FP8_BYTES, SCALE_BYTES = 1, 4
GPU_BUFFER_FACTOR = 1.5
"""Expert buffers of GPUs by default, as a multiple of balanced load. One layer of Qwen3-30B-A3B on
8 GPUs has 1.6 GiB of temporaries with them, and 5.6 with buffers for any routing."""
ROW_TILE = 32
"""Rows that expert buffers are rounded up to: the smaller tile of the grouped product "tiles"."""


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
