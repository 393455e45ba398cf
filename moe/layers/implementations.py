"""Default implementations: the kernels that None in `moe.execution.Execution` selects on this
process's devices.

A kernel is selected if it was measured to be the fastest and supports the network; otherwise the
default of the operation applies. `benchmarks/results` has the measurements.
"""

from collections.abc import Callable
from typing import NamedTuple

from moe.attention.latent import caches_latent
from moe.config import ModelConfig
from moe.kernels import decode_attention, latent_decode
from moe.kernels.choice import capability, foreign_gpus
from moe.kernels.mosaic import LANES


class Kernel(NamedTuple):
    """Kernel that is the default for networks that it supports.

    Attributes:
      name: name of the implementation.
      unserved: from a network and the number of devices that its experts are split over (``etp``)
        to the reason why the kernel does not support it, or None.
      reason: reason for the choice, with the measurement.
      hopper_alone: it uses Hopper's matrix units, which later GPUs lack.
    """

    name: str
    unserved: Callable[[ModelConfig, int], str | None]
    reason: str
    hopper_alone: bool


def selected_implementation(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """Implementation for a field of `Execution`: the name there, or the kernel that None selects.

    Args:
      etp: number of devices that one expert is split over.

    Returns:
      A name, or None for the default of the operation.
    """
    name = getattr(config.execution, field)
    if name is not None or why_not(config, field, etp) is not None:
        return name
    return KERNELS[field].name


def why_not(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """The reason why None in a field does not select its kernel; None if it does."""
    if not capability():
        return "no NVIDIA GPU"
    kernel = KERNELS[field]
    foreign = foreign_gpus(hopper_alone=kernel.hopper_alone)
    return foreign if foreign is not None else kernel.unserved(config, etp)


def explained(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """Explanation in a line of what None in a field selects; None if there is nothing to select: a
    name is given, or there is no GPU."""
    if getattr(config.execution, field) is not None or not capability():
        return None
    obstacle, kernel = why_not(config, field, etp), KERNELS[field]
    if obstacle is None:
        return f"{kernel.name} ({kernel.reason})"
    return f"not {kernel.name}: {obstacle}"


def unserved_by_decode_kernel(config: ModelConfig) -> str | None:
    """The reason why the decode kernels do not support the network's heads; None if they do."""
    if config.attention_sinks:
        return "attention sinks in the softmax"
    if config.mla is not None and caches_latent(config):
        rank = config.mla.kv_lora_rank
        return latent_decode.unserved(config.dtype, rank + config.mla.qk_rope_head_dim, rank)
    together = config.num_heads // config.num_kv_heads
    widths = config.head_dim, config.v_head_dim
    return decode_attention.unserved(config.dtype, together, *widths)


def _unserved_experts(config: ModelConfig, etp: int) -> str | None:
    if config.dtype not in ("bfloat16", "float16"):
        return f"rows of {config.dtype}, and the matrix units take half precision alone"
    if config.d_model % LANES:
        return f"rows of {config.d_model} numbers, and each is moved by {LANES} threads"
    hidden = config.d_expert // etp
    return f"{hidden} hidden units, no multiple of 64" if hidden % 64 else None


def _unserved_router(config: ModelConfig, etp: int) -> str | None:
    experts = config.num_experts
    if experts % 8 == 0 and 8 <= experts <= 128:
        return None
    return f"{experts} experts, where it takes a multiple of 8 up to 128 without a spill"


KERNELS = {
    "experts": Kernel(
        "mosaic",
        _unserved_experts,
        'an eighth of the time of "blocks" with 128 experts on an H200',
        hopper_alone=True,
    ),
    "router": Kernel(
        "mosaic",
        _unserved_router,
        "three quarters of the time of the plain router on an H200",
        hopper_alone=False,
    ),
    "decode_attention": Kernel(
        "mosaic",
        lambda config, etp: unserved_by_decode_kernel(config),
        "reads no more of a row than its tokens",
        hopper_alone=True,
    ),
}
"""By the field of `Execution`."""
