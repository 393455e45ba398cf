"""Execution options: implementations, remat, sharding and overlap.

Values are the same up to rounding, with two exceptions: `Execution.activation_wire`, and
`Execution.buffer_factor` in a pass that overflows.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from sharding.compression import ACTIVATION_DTYPES

Dispatch = Literal["all_to_all", "all_gather", "ragged", "two_level", "two_level_ragged"]
TWO_LEVELS = ("two_level", "two_level_ragged")
"""Token dispatchers that know servers."""
SLICES = ("ragged", "two_level_ragged")
"""Token dispatchers that send slices of dynamic length, by `jax.lax.ragged_all_to_all`."""


REMOVED_EXPERTS = {
    "mosaic_fused": "mosaic",
    "mosaic_gathered": "mosaic",
    "mosaic_scattered": "mosaic",
    "megablox": "blocks",
    "ragged_dot": "batched",
}
"""Names of `Execution.experts` that run folders and settings files of earlier versions may have,
with the implementation to choose instead."""


def _option(default: Any, **properties: Any) -> Any:
    """A field of `Execution` with what it is: ``implementation`` selects one for the devices,
    ``experts`` applies to networks with experts only, ``changeable`` changes no more than the
    rounding of results (the default), ``cache`` changes the arrays of the KV cache, and ``removed``
    maps names of earlier versions to those to choose instead."""
    return field(default=default, metadata=properties)


@dataclass(frozen=True)
class Execution:
    """Implementation of each part of the network, and memory and overlap settings; None picks the
    best that applies.

    A name requires that implementation, and raises if it is not supported. The defaults are in the
    table of `moe.implementations`.
    """

    CHANGEABLE: ClassVar[bool] = True

    context: Literal["gather", "ring", "ulysses"] | None = _option(None, implementation=True)
    """Context-parallel attention over cp: all-gather of keys and values, a ring, or an all-to-all
    from tokens to heads and back (`moe.attention.context_parallel`). None is ulysses if cp divides
    the query heads of a tp rank and it sends fewer elements, else gather."""
    dispatch: Dispatch | None = _option(None, implementation=True, experts=True)
    """Token dispatch to experts on other devices: an all-to-all, an all-gather, a ragged all-to-all
    of exactly sized slices (GPU and TPU), or a two-level all-to-all, which sends one copy of a
    token to each server of its experts and from there one to each device, with buffers of one size
    or in slices (GPU and TPU). None is the fastest of the first three, on GPUs of the first two,
    by its bytes and the links between the devices (`moe.experts.dispatch.cost`); the run prints
    which."""
    server_devices: int | None = _option(None, implementation=True, experts=True)
    """Devices of a server, for the two-level dispatch: each server has this many consecutive
    devices. None is the number that fast links join by the planner's table of devices
    (`sharding.costs.hardware`)."""
    exchange_rate: float | None = _option(None, experts=True)
    """For the choice of a dispatch, the rate of an all-to-all as a fraction of a ring's: python -m
    benchmarks.dispatch measures it. None is the planner's number for such devices."""
    activation_wire: Literal["float8_e4m3fn"] | None = _option(None, experts=True, changeable=False)
    """Communication dtype of tokens sent to experts on other devices, of their outputs, and of the
    gradients of both: one byte per element and float32 scales, per token forward and per channel of
    128 tokens backward (`sharding.compression`). Sampling and scoring send the same. None is the
    dtype of activations."""
    attention: Literal["plain", "blocked", "xla", "cudnn", "mosaic"] | None = _option(
        None, implementation=True
    )
    """Attention on one device (`moe.attention.core`): all scores in memory, block by block, XLA's,
    or FlashAttention in bfloat16, NVIDIA's (cudnn) or ours for Hopper (mosaic). None is the best of
    the others that applies."""
    decode_attention: Literal["plain", "mosaic"] | None = _option(None, implementation=True)
    """Attention of a decode step over its KV cache; mosaic is a kernel for NVIDIA's Hopper that
    reads no more of a row than its tokens. None is mosaic there if it supports the heads, else
    plain."""
    latent: Literal["absorbed", "expanded"] | None = _option(None, cache=True)
    """KV cache of multi-head latent attention: latent vectors (absorbed), or the keys and values
    computed from them (expanded). None is absorbed."""
    router: Literal["plain", "mosaic"] | None = _option(None, implementation=True, experts=True)
    """Top-k routing of tokens to experts; mosaic is a kernel for NVIDIA's Hopper and later GPUs.
    None is mosaic there for a multiple of 8 experts, up to 128, else plain."""
    experts: Literal["tiles", "batched", "blocks", "mosaic", "plain"] | None = _option(
        None, implementation=True, experts=True, removed=REMOVED_EXPERTS
    )
    """Grouped GEMM of the experts; mosaic are kernels for NVIDIA's Hopper. None is mosaic there in
    half precision if d_model is a multiple of 128 and d_expert / etp of 64, batched on other GPUs,
    tiles on a CPU, blocks on a TPU."""
    remat: Literal["none", "selective", "projections", "full"] = "none"
    """Gradient checkpointing: what the backward pass of a layer recomputes instead of storing it;
    each choice stores less than the one before (`moe.remat`)."""
    fsdp: bool = False
    """Shard weights over the devices that would replicate them (fully sharded data parallelism) and
    gather them layer by layer, forward and again backward. Needs a remat other than none."""
    overlap_grad_reduce: bool = False
    """Reduce the gradients of each layer over devices as soon as the backward pass of an update's
    last micro-batch has left the layer, overlapped with the rest of it; else after the pass.
    Compiles a separate program for that micro-batch. Not supported with pp."""
    buffer_factor: float | None = _option(None, experts=True)
    """Buffer size of the experts of a device, as a multiple of their tokens under balanced routing;
    1.5 is usual, 0 means worst-case buffers. An update, a scoring pass or a prefill that
    overflows is discarded and recomputed with worst-case buffers, so that results do not depend on
    it. None is worst-case buffers; in a run, 1.5 on GPUs."""
    expert_chunks: int | None = _option(None, experts=True)
    """Chunks in which the tokens of a device are sent to the experts and back, so that the
    communication of one overlaps the GEMMs of another. A decode step has few tokens
    and uses 1. None is 1; in a run, 2 on GPUs."""
    two_batch_overlap: bool = False
    """Run the rows of a device through each layer as two independent half-batches, so that the
    communication of one overlaps the computation of the other (`moe.layers.two_batch_overlap`). A
    single row is not split, nor are rows in decoding. Not with a capacity that drops tokens."""
    scan_layers: bool | None = _option(None, cache=True)
    """Compile one layer, or one period of repeating layer types (windows, Gated DeltaNet), and scan
    over it, so that compilation time does not grow with the number of layers. None scans over more
    than eight layers, and in decoding on GPUs over none (`moe.decoding.step_config`)."""
    vocab_chunk: int | None = 8192
    """Vocabulary entries whose logits a device computes at a time in training; None is all."""

    @property
    def num_chunks(self) -> int:
        """`expert_chunks`, 1 for None."""
        return 1 if self.expert_chunks is None else self.expert_chunks

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
        if self.buffer_factor == 0:
            object.__setattr__(self, "buffer_factor", None)
        if self.buffer_factor is not None and not 0 < self.buffer_factor < math.inf:
            raise ValueError(
                f"buffer_factor={self.buffer_factor} must not be negative: 1 fits balanced "
                "routing, 1.5 is usual, and 0 fits any routing."
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
        if self.num_chunks < 1:
            raise ValueError(
                f"expert_chunks={self.expert_chunks} must be at least 1: 1 sends all tokens in one "
                "chunk, and 2 or more overlap communication with computation."
            )
        if self.vocab_chunk is not None and self.vocab_chunk < 1:
            raise ValueError(
                f"vocab_chunk={self.vocab_chunk} must be at least 1; None computes the logits of "
                "all columns in one chunk."
            )
