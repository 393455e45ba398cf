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


class DefaultKernel(NamedTuple):
    """Kernel that is the default for networks that it supports.

    Attributes:
      name: name of the implementation.
      obstacle: from a network and the number of devices that its experts are split over (``etp``)
        to the reason why the kernel does not support it, or None.
      reason: reason for the choice, with the measurement.
      hopper_only: it uses Hopper's matrix units, which later GPUs lack.
    """

    name: str
    obstacle: Callable[[ModelConfig, int], str | None]
    reason: str
    hopper_only: bool


def selected_implementation(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """Implementation for a field of `Execution`: the name there, or the kernel that None selects.

    Args:
      etp: number of devices that one expert is split over.

    Returns:
      A name, or None for the default of the operation.
    """
    name = getattr(config.execution, field)
    if name is not None or selection_obstacle(config, field, etp) is not None:
        return name
    return KERNELS[field].name


def selection_obstacle(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """The reason why None in a field does not select its kernel; None if it does."""
    if not capability():
        return "no NVIDIA GPU"
    kernel = KERNELS[field]
    foreign = foreign_gpus(hopper_only=kernel.hopper_only)
    return foreign if foreign is not None else kernel.obstacle(config, etp)


def explain_selection(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """Explanation in a line of what None in a field selects; None if there is nothing to select: a
    name is given, or there is no GPU."""
    if getattr(config.execution, field) is not None or not capability():
        return None
    obstacle, kernel = selection_obstacle(config, field, etp), KERNELS[field]
    if obstacle is None:
        return f"{kernel.name} ({kernel.reason})"
    return f"not {kernel.name}: {obstacle}"


def unsupported_by_decode_kernel(config: ModelConfig) -> str | None:
    """The reason why the decode kernels do not support the network's heads; None if they do."""
    if config.attention_sinks:
        return "attention sinks in the softmax"
    if config.mla is not None and caches_latent(config):
        rank = config.mla.kv_lora_rank
        return latent_decode.unsupported_vectors(
            config.dtype, rank + config.mla.qk_rope_head_dim, rank
        )
    group = config.num_heads // config.num_kv_heads
    widths = config.head_dim, config.v_head_dim
    return decode_attention.unsupported_heads(config.dtype, group, *widths)


def _experts_obstacle(config: ModelConfig, etp: int) -> str | None:
    if config.dtype not in ("bfloat16", "float16"):
        return f"rows of {config.dtype} (needs bfloat16 or float16)"
    if config.d_model % LANES:
        return f"d_model={config.d_model} (needs a multiple of {LANES})"
    hidden = config.d_expert // etp
    return f"{hidden} hidden units per device (needs a multiple of 64)" if hidden % 64 else None


def _router_obstacle(config: ModelConfig, etp: int) -> str | None:
    experts = config.num_experts
    if experts % 8 == 0 and 8 <= experts <= 128:
        return None
    return f"{experts} experts (needs a multiple of 8 up to 128, or registers spill)"


KERNELS = {
    "experts": DefaultKernel(
        "mosaic",
        _experts_obstacle,
        'an eighth of the time of "blocks" with 128 experts on an H200',
        hopper_only=True,
    ),
    "router": DefaultKernel(
        "mosaic",
        _router_obstacle,
        "three quarters of the time of the plain router on an H200",
        hopper_only=False,
    ),
    "decode_attention": DefaultKernel(
        "mosaic",
        lambda config, etp: unsupported_by_decode_kernel(config),
        "reads only the tokens of each row",
        hopper_only=True,
    ),
}
"""By the field of `Execution`."""
