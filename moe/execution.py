"""How the network is computed, apart from what it is: choices of time and memory, not of
values but for one, `Execution.activation_wire`."""

import math
from dataclasses import dataclass

from sharding.activation_wire import WIRES


@dataclass(frozen=True)
class Execution:
    """Which implementation computes each part; None picks the best that applies.

    A name demands that implementation and raises where it cannot serve.

    Args:
      attention: core attention on one device: "plain", "blocked", "xla", "cudnn" or "mosaic", our
        kernels for Hopper (`moe.attention.core`), which None does not choose.
      context: how attention crosses the devices of ``cp``: "gather", "ring" or "ulysses"
        (`moe.attention.context_parallel.choice`).
      latent: what decoding keeps of latent attention: "absorbed", the narrow vectors that keys and
        values come from, or "expanded", those keys and values (`moe.attention.latent`).
      decode_attention: attention of a decoding step over its cache: "plain", or "mosaic", a kernel
        for Hopper that reads no more of a row than its tokens (`moe.kernels.decode_attention`, and
        `moe.kernels.latent_decode` of narrow vectors); None is
        "mosaic" on Hopper where it serves the network's heads, else "plain".
      dispatch: how tokens travel to the experts of other devices: "all_to_all", "all_gather" or
        "ragged"; None is what takes least time on their links (`moe.experts.dispatch.cost`).
      exchange_rate: for that choice, the rate of an all-to-all as a part of that of a ring over the
        same devices, as `benchmarks/dispatch.py` measures it; None is the planner's number.
      activation_wire: what tokens travel to the experts of other devices in, and their sums back,
        forward and backward: "float8_e4m3fn" with float32 scales (`sharding.activation_wire`); None
        is their own dtype. Of all fields the one that changes values.
      router: how scores become choices and probs: "plain", or "mosaic", one kernel for Hopper
        (`moe.kernels.routing`); None is "mosaic" on Hopper and later ones for up to 128
        experts, else "plain".
      experts: how rows are multiplied, each by its own expert's matrix
        (`moe.experts.feed_forward.routed_experts`); None is "mosaic" on Hopper in half
        precision where widths are multiples of 64. `moe.layers.implementations` has these choices.
      remat: what the backward pass computes again instead of keeping it: "none", "selective",
        "projections" or "full" (`moe.remat`).
      fsdp: weights are kept in shards, each on one of the devices that would hold the same, and the
        layers joined one after the other when an update runs them (`sharding.zero.unshard`),
        forward and again backward. Needs a `remat` that does not keep them.
      overlap_grad_reduce: the gradients of each layer are summed over devices inside the backward
        pass of an update's last micro-batch, beside that of the layers below, in place of all when
        it is done (`sharding.reduction`). That micro-batch is then compiled as a program beside
        that of the others. Not through a pipeline.
      buffer_factor: room for the tokens that come to the experts of a device, as a multiple of what
        even routing sends (`moe.experts.dispatch.buffers`); None is room for any routing. What
        finds none is counted in `RouterStatistics.overflow`, and a pass in which that is not 0 has
        to be run again without this: `jrl` does so.
      expert_chunks: parts that the tokens of a device go to the experts and back in, so that one
        part may travel while another is multiplied (`moe.experts.dispatch.token_chunks`). A step
        of decoding, which has few tokens, takes 1.
      two_batch_overlap: the rows of a device go through each layer in two halves that nothing
        orders, so that one half may communicate while the other is multiplied
        (`moe.layers.halves`). A single row, or prompt with its responses, goes at once, and so do
        rows in decoding. Not where a capacity drops choices.
      scan_layers: one program for all layers of a stack, or for the few after which their kinds
        come again (`moe.layers.depth`), whose compilation does not take longer the more they are,
        in place of one for each; None where there are more than a few.
      vocab_chunk: columns of the head whose logits are there at a time in training, on each ``tp``
        rank; None is all of them (`moe.head`).
    """

    attention: str | None = None
    context: str | None = None
    latent: str | None = None
    decode_attention: str | None = None
    dispatch: str | None = None
    exchange_rate: float | None = None
    activation_wire: str | None = None
    router: str | None = None
    experts: str | None = None
    remat: str = "none"
    fsdp: bool = False
    overlap_grad_reduce: bool = False
    buffer_factor: float | None = None
    expert_chunks: int = 1
    two_batch_overlap: bool = False
    scan_layers: bool | None = None
    vocab_chunk: int | None = 8192

    def __post_init__(self):
        if self.fsdp and self.remat == "none":
            raise ValueError(
                'fsdp with remat="none" keeps every layer that it joined until the backward pass: '
                'choose remat="selective", "projections" or "full".'
            )
        if self.buffer_factor is not None and not 0 < self.buffer_factor < math.inf:
            raise ValueError(
                f"buffer_factor={self.buffer_factor} must be above 0: 1 is room for even routing, "
                "1.5 is usual, and None is room for any."
            )
        if self.activation_wire not in (None, *WIRES):
            raise ValueError(
                f"activation_wire={self.activation_wire!r} is nothing that tokens are sent in: use "
                f"{', '.join(WIRES)}, or None for their own dtype."
            )
        if self.exchange_rate is not None and not 0 < self.exchange_rate < math.inf:
            raise ValueError(
                f"exchange_rate={self.exchange_rate} must be above 0: 1 is an all-to-all as "
                "fast as a ring, python -m benchmarks.dispatch measures it, and None is the "
                "planner's."
            )
        if self.expert_chunks < 1:
            raise ValueError(
                f"expert_chunks={self.expert_chunks} sends no token to an expert: use 1 for all "
                "tokens at once, or 2 or more to communicate beside products."
            )
        if self.vocab_chunk is not None and self.vocab_chunk < 1:
            raise ValueError(
                f"vocab_chunk={self.vocab_chunk} takes no column of the head: use 1 or more, or "
                "None for all at once."
            )
