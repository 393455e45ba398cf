"""Predicted speeds of published measurements, with the settings that these were made with."""

import functools
from dataclasses import replace

from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout
from sharding.planner.calibration import METHODS, fit
from sharding.planner.cost import Cost, System, cost
from sharding.planner.memory import memory
from sharding.planner.method import Batch, Method
from sharding.planner.models import PRESETS
from sharding.planner.search import Choices, Plan, best_plan
from sharding.planner.validation.evidence import EVIDENCE, Evidence

BLACKWELL = ("b200", "gb200", "b300")
DISPATCHES = {"Megatron-Core": ("ragged", "deepep")}
"""Dispatches of a program that has more than one."""


def system_of(name: str, hardware: str) -> System:
    """A system with its efficiency on a type of device.

    Efficiency is that of the one fitted row of the system on Blackwell, or on other devices. The
    experts of AutoModel and MaxText are one product, which the host launches at once.
    """
    if name == "MegaScale-MoE":
        return fit(name)
    return _megatron_or_other(
        name.removesuffix(" with FSDP"), hardware in BLACKWELL, "FSDP" in name
    )


@functools.cache
def _megatron_or_other(name: str, is_blackwell: bool, waits: bool) -> System:
    system = replace(fit("Megatron-Core"), hides_shards=not waits)
    if name != "Megatron-Core":
        system = replace(system, launch=0.0)
    elif not is_blackwell:
        return system
    (point,) = (
        row
        for row in EVIDENCE
        if row.fitted and row.system == name and (row.hardware in BLACKWELL) == is_blackwell
    )
    low, high = 0.05, 1.5
    for _ in range(30):
        middle = (low + high) / 2
        step = cost_of(point, replace(system, efficiency=middle))
        assert step is not None
        is_slower = tokens_per_second(point, step) < point.tokens_per_second
        low, high = (middle, high) if is_slower else (low, middle)
    return replace(system, efficiency=(low + high) / 2)


def tokens_per_second(row: Evidence, step: Cost) -> float:
    """Predicted tokens per second of one device."""
    return row.rows * row.time / step.total / row.num_devices


@functools.cache
def predict(row: Evidence) -> float | None:
    """Predicted tokens per second of one device; None where nothing fits in its memory."""
    step = cost_of(row, system_of(row.system, row.hardware))
    return None if step is None else tokens_per_second(row, step)


def cost_of(row: Evidence, system: System) -> Cost | None:
    """Time of a step with a row's settings.

    Those that are not published are chosen; of rematerialisations the first that fits.
    """
    model, hardware, layout = PRESETS[row.model], HARDWARE[row.hardware], Layout.parse(row.layout)
    system = replace(system, hides_experts=row.overlaps_experts)
    if row.graphs:
        system = replace(system, launch=0.0)
    method = method_of(row)
    if row.micro_rows is not None:
        batch = Batch(row.rows, row.time, row.micro_rows)
        if row.remat is None:
            fitting = (
                each
                for each in (replace(method, remat=remat) for remat in Choices().remat)
                if memory(model, layout, batch, each).total <= hardware.memory
            )
            method = next(fitting, replace(method, remat="full"))
        return cost(model, layout, batch, method, hardware, system)
    choices = Choices(
        (method.dispatch,), (method.context,), (method.storage,), micro_rows=(1, 2, 4, 8)
    )
    sizes = row.rows, row.time
    plan = best_plan(model, layout, *sizes, hardware, method, system, choices)
    return plan.cost if isinstance(plan, Plan) else None


def method_of(row: Evidence) -> Method:
    """Execution settings of a row. Programs of 2025 and later dispatch tokens with DeepEP."""
    method = METHODS["MegaScale-MoE" if row.system == "MegaScale-MoE" else "Megatron-Core"]
    method = replace(method, fsdp=row.fsdp)
    if row.micro_rows is None:
        return method
    return replace(
        method,
        dispatch=row.dispatch,
        remat=row.remat or "none",
        repeats_experts=row.repeats_experts,
        expert_block=row.expert_block,
    )
