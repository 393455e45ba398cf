"""Execution options: implementations, remat, sharding and overlap.

Values are the same up to rounding, with two exceptions: `Execution.activation_wire`, and
`Execution.buffer_factor` in a pass that overflows.
"""

import math
from dataclasses import dataclass

from sharding.compression import ACTIVATION_DTYPES

TWO_LEVELS = ("two_level", "two_level_ragged")
"""Token dispatchers that know servers."""
SLICES = ("ragged", "two_level_ragged")
"""Token dispatchers that send slices of dynamic length, by `jax.lax.ragged_all_to_all`."""


@dataclass(frozen=True)
class Execution:
    """Implementation of each part of the network, and memory and overlap settings; None picks the
    best that applies.

    A name requires that implementation, and raises where it is not supported.

    Args:
      attention: core attention on one device: "plain", "blocked", "xla", "cudnn" or "mosaic", our
        kernels for Hopper (`moe.attention.core`). None is "cudnn" on a GPU if it supports the
        arrays, or "mosaic" on Hopper if that does; otherwise "plain" or, for many scores,
        "blocked".
      context: context parallelism of attention over ``cp``: "gather", "ring" or "ulysses"
        (`moe.attention.context_parallel`). None is "ulysses" if ``cp`` divides the query
        heads of a ``tp`` rank and it sends fewer elements than "gather"; otherwise "gather".
      latent: contents of the KV cache of multi-head latent attention (MLA): "absorbed", the latent
        vectors, or "expanded", the keys and values (`moe.attention.latent`); None is "absorbed".
      decode_attention: attention of a decode step over the KV cache: "plain", or "mosaic", a kernel
        for Hopper that reads no more of a row than its tokens (`moe.kernels.decode_attention`, and
        `moe.kernels.latent_decode` for latent vectors); None is "mosaic" on Hopper if it supports
        the network's heads, else "plain".
      dispatch: token dispatch to the experts of other devices: "all_to_all", "all_gather",
        "ragged", or "two_level" and "two_level_ragged", which send one copy of a token to a server;
        None is the one of the first three with the least predicted time, of the first two on GPUs
        (`moe.experts.dispatch.cost`).
      server_devices: devices of a server, for `TWO_LEVELS`; None is the number that the fast links
        of such devices join (`sharding.costs.hardware`).
      exchange_rate: for that prediction, the rate of an all-to-all as a fraction of that of a ring
        over the same devices, as `benchmarks/dispatch.py` measures it; None is the planner's
        number.
      activation_wire: communication dtype of token dispatch and combine, forward and backward:
        "float8_e4m3fn" with float32 scales (`sharding.compression`); None is the dtype of
        activations. It rounds what is sent.
      router: scores, top-k and gate weights: "plain", or "mosaic", one kernel for Hopper and later
        GPUs (`moe.kernels.routing`); None is "mosaic" on these for a multiple of 8 experts, up to
        128, else "plain".
      experts: grouped GEMMs, each row by the matrix of its expert: "tiles", "batched", "blocks",
        "mosaic", "megablox", "ragged_dot" or "plain" (`moe.experts.grouped_dot`), or
        "mosaic_fused", "mosaic_gathered" or "mosaic_scattered"
        (`moe.experts.feed_forward.routed_experts`). None is "mosaic" on Hopper in half precision,
        if `d_model` is a multiple of 128 and ``d_expert / etp`` of 64; otherwise "batched" on GPUs,
        "tiles" on a CPU and "blocks" on a TPU. The table of `moe.implementations` has this choice,
        and those of `attention`, `decode_attention` and `router`.
      remat: activation recomputation (gradient checkpointing) in the backward pass: "none",
        "selective", "projections" or "full" (`moe.remat`).
      fsdp: weights are sharded over the devices that would replicate them, and all-gathered layer
        by layer when an update runs (`sharding.zero.unshard`), forward and again backward. Needs a
        `remat` that does not save them.
      overlap_grad_reduce: the gradients of each layer are reduced over devices inside the backward
        pass of an update's last micro-batch, overlapped with that of the layers below, instead of
        all at the end (`sharding.zero`). That micro-batch is then a second compiled program.
        Not with pipeline parallelism.
      buffer_factor: size of the buffers for tokens that arrive at the experts of a device, as a
        multiple of balanced load (`moe.experts.dispatch.buffers`); None is enough for any routing.
        Overflow is counted in `RouterStatistics.overflow`; a pass in which that is not 0 must be
        recomputed without this setting, as `jrl` does.
      expert_chunks: number of chunks in which the tokens of a device are dispatched and combined,
        so that communication of one overlaps the GEMMs of another
        (`moe.experts.dispatch.choice`). A decode step, which has few tokens, uses 1.
      two_batch_overlap: the rows of a device go through each layer in two independent halves, so
        that communication of one overlaps computation of the other
        (`moe.layers.two_batch_overlap`). A single row, or prompt with its responses, is not split,
        nor are rows in decoding. Not with a capacity that drops tokens.
      scan_layers: `lax.scan` over the layers of a stack, or over one period of layer types
        (`moe.layers.depth`), so that compile time does not grow with depth; None is true for more
        than a few layers.
      vocab_chunk: vocabulary columns per chunk of logits in training, on each ``tp`` rank; None is
        all of them (`moe.head`).
    """

    attention: str | None = None
    context: str | None = None
    latent: str | None = None
    decode_attention: str | None = None
    dispatch: str | None = None
    server_devices: int | None = None
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

    @property
    def overlaps(self) -> bool:
        """False for `SLICES`: on GPUs, XLA's latency-hiding scheduler with ragged all-to-alls has
        made gradients NaN (https://github.com/marin-community/marin/issues/8077)."""
        return self.dispatch not in SLICES

    def __post_init__(self):
        if self.fsdp and self.remat == "none":
            raise ValueError(
                'fsdp with remat="none" keeps every all-gathered layer until the backward pass: '
                'choose remat="selective", "projections" or "full".'
            )
        if self.buffer_factor is not None and not 0 < self.buffer_factor < math.inf:
            raise ValueError(
                f"buffer_factor={self.buffer_factor} must be above 0: 1 fits balanced routing, "
                "1.5 is usual, and None fits any routing."
            )
        if self.activation_wire not in (None, *ACTIVATION_DTYPES):
            raise ValueError(
                f"activation_wire={self.activation_wire!r} is not a communication dtype: use "
                f"{', '.join(ACTIVATION_DTYPES)}, or None for the dtype of activations."
            )
        if self.server_devices is not None and self.server_devices < 1:
            raise ValueError(
                f"server_devices={self.server_devices} must be at least 1: 8 is usual, and None is "
                "the number of such devices that fast links join."
            )
        if self.server_devices is not None and self.dispatch not in TWO_LEVELS:
            raise ValueError(
                f"server_devices={self.server_devices} changes nothing with dispatch="
                f'{self.dispatch!r}: leave it out, or choose dispatch="two_level".'
            )
        if self.exchange_rate is not None and not 0 < self.exchange_rate < math.inf:
            raise ValueError(
                f"exchange_rate={self.exchange_rate} must be above 0: 1 is an all-to-all as "
                "fast as a ring, python -m benchmarks.dispatch measures it, and None is the "
                "planner's value."
            )
        if self.expert_chunks < 1:
            raise ValueError(
                f"expert_chunks={self.expert_chunks} must be at least 1: 1 sends all tokens in one "
                "chunk, and 2 or more overlap communication with computation."
            )
        if self.vocab_chunk is not None and self.vocab_chunk < 1:
            raise ValueError(
                f"vocab_chunk={self.vocab_chunk} must be at least 1; None computes the logits of "
                "all columns in one chunk."
            )
