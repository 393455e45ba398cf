"""The implementations that None of `moe.execution.Execution` stands for on this process's devices.

A kernel is chosen where it was measured to be the fastest and can serve the network; elsewhere None
is what the operation itself says. `benchmarks/results` has the measurements.
"""

from collections.abc import Callable
from typing import NamedTuple

from moe.attention.latent import keeps_narrow
from moe.config import ModelConfig
from moe.kernels import decode_attention, latent_decode
from moe.kernels.choice import capability, foreign_gpus
from moe.kernels.mosaic import LANES


class Kernel(NamedTuple):
    """What None stands for where it can serve.

    Attributes:
      name: of the implementation.
      unserved: what keeps it from a network whose experts are cut over that many devices.
      reason: it is chosen, with what was measured.
      hopper_alone: it multiplies with Hopper's matrix units, which later GPUs have not.
    """

    name: str
    unserved: Callable[[ModelConfig, int], str | None]
    reason: str
    hopper_alone: bool


def chosen(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """The implementation of a field of `Execution`: what is named there, or what None stands for.

    Args:
      etp: devices that one expert is cut over.

    Returns:
      None where the operation itself chooses.
    """
    name = getattr(config.execution, field)
    if name is not None or why_not(config, field, etp) is not None:
        return name
    return KERNELS[field].name


def why_not(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """What keeps None of a field from standing for its kernel; None where nothing does."""
    if not capability():
        return "no NVIDIA GPU"
    kernel = KERNELS[field]
    foreign = foreign_gpus(hopper_alone=kernel.hopper_alone)
    return foreign if foreign is not None else kernel.unserved(config, etp)


def explained(config: ModelConfig, field: str, etp: int = 1) -> str | None:
    """What None of a field stands for and why, in a line; None where it is no choice: a name is
    given, or there is no GPU."""
    if getattr(config.execution, field) is not None or not capability():
        return None
    obstacle, kernel = why_not(config, field, etp), KERNELS[field]
    if obstacle is None:
        return f"{kernel.name} ({kernel.reason})"
    return f"not {kernel.name}: {obstacle}"


def unserved_by_decode_kernel(config: ModelConfig) -> str | None:
    """What keeps the kernels of a decoding step from the network's heads."""
    if config.attention_sinks:
        return "attention sinks in the softmax"
    if config.mla is not None and keeps_narrow(config):
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
