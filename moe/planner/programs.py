"""Training systems that the planner models: execution settings, overlap and fitted numbers.

`python -m benchmarks.planner.calibration`, in a checkout, fits the numbers to published speeds.
"""

from dataclasses import replace

from moe.execution import Execution
from moe.planner.cost import System
from moe.planner.method import Method, with_fields
from sharding.costs.hardware import Hardware

_MEGATRON_CORE = Method(
    Execution(dispatch="ragged", overlap_grad_reduce=True),
    storage="mixed",
    even=True,
    resends=False,
    in_place=True,
    fused_activation=True,
)
METHODS = {
    "Megatron-Core": _MEGATRON_CORE,
    "MegaScale-MoE": with_fields(
        _MEGATRON_CORE, context="ulysses", storage="mixed-bfloat16-wire", resends=True
    ),
}
SYSTEMS = {
    "Megatron-Core": System(
        efficiency=0.61883,
        launch=9.7171e-5,
        hides_hops=True,
        hides_gradients=True,
        hides_embed_and_head=True,
        fills_stages=True,
    ),
    "MegaScale-MoE": System(
        efficiency=0.37728,
        hidden=1.0,
        hides_hops=True,
        hides_gradients=True,
        hides_embed_and_head=True,
    ),
}
"""Megatron-Core waits for what a layer sends; hiding it is what MegaScale-MoE is about."""
BLACKWELL = ("b200", "gb200", "b300")
BLACKWELL_EFFICIENCY = 0.41420
"""`System.efficiency` of Megatron-Core on `BLACKWELL`."""
DISPATCHES = {"Megatron-Core": ("ragged", "deepep")}
"""Dispatches of a program that has more than one."""


def system_on(name: str, hardware: str) -> System:
    """A program's system on a type of device, for example Megatron-Core on gb200."""
    if name == "Megatron-Core" and hardware in BLACKWELL:
        return replace(SYSTEMS[name], efficiency=BLACKWELL_EFFICIENCY)
    return SYSTEMS[name]


def library_system(hardware: Hardware) -> System:
    """System of this library: products as fast as Megatron-Core's, overlap as a run requests it.

    The overlaps are those of expert chunks, two-batch overlap and gradient reduction. None of this
    is measured on an accelerator.
    """
    overlaps = hardware.overlaps
    return System(
        SYSTEMS["Megatron-Core"].efficiency,
        hides_gradients=overlaps,
        hides_chunks=overlaps,
        hides_two_batch=overlaps,
    )
