"""Default implementations: the kernels that None in `moe.execution.Execution` selects on this
process's devices.

A kernel is selected if it was measured to be the fastest and supports the network; otherwise the
default of the operation applies. `benchmarks/results` has the measurements.
"""

from collections.abc import Callable
from typing import NamedTuple

from moe.attention.latent import caches_latent
from moe.config import ModelConfig
from moe.kernels import decode_attention, grouped, latent_decode, routing, rows
from moe.kernels.choice import NAMES, capability, foreign_gpus, unsupported_dtype


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


def check_decode_kernel(config: ModelConfig) -> None:
    """Checks, before anything is traced, that the kernel of `Execution.decode_attention` supports
    the network. The device is checked when a program is lowered.

    Raises:
      ValueError: if it does not, with the rule and the fix.
    """
    obstacle = decode_kernel_obstacle(config)
    if obstacle is not None:
        name = config.execution.decode_attention
        raise ValueError(f"decode_attention={name!r} {obstacle}; use None.")


def decode_kernel_obstacle(config: ModelConfig) -> str | None:
    """The reason why the named kernel does not support the network's heads, as the end of a
    sentence; None if it does, or if none is named."""
    name = config.execution.decode_attention
    if name is None or name == "plain":
        return None
    if name not in NAMES:
        return f"is not known: choose among {', '.join(map(repr, NAMES))}"
    if name == "interpreted":
        return "is not supported: Pallas's interpreter has no matrix units"
    reason = unsupported_by_decode_kernel(config)
    return None if reason is None else f"is not supported: {reason}"


def _experts_obstacle(config: ModelConfig, etp: int) -> str | None:
    # Kernels permute rows of d_model elements, and multiply them.
    hidden = config.d_expert // etp
    sizes = {
        f"d_model={config.d_model}": rows.unsupported_width(config.d_model)
        or grouped.unsupported_size(config.d_model),
        f"{hidden} hidden units per device": grouped.unsupported_size(hidden),
    }
    reasons = (f"{size} ({rule})" for size, rule in sizes.items() if rule is not None)
    return unsupported_dtype("rows", config.dtype) or next(reasons, None)


def _router_obstacle(config: ModelConfig, etp: int) -> str | None:
    most = routing.MAX_EXPERTS_WITHOUT_SPILLS
    if routing.supports_experts(config.num_experts, most):
        return None
    return f"{config.num_experts} experts (needs a multiple of 8 up to {most}, or registers spill)"


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
