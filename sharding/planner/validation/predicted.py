"""Predicted speeds of published measurements, with the settings that these were made with, and the
accuracy of the predictions: errors, and rank correlations of models."""

import functools
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout
from sharding.planner.calibration import METHODS, bisect, fit
from sharding.planner.cost import Cost, System, cost
from sharding.planner.memory import memory
from sharding.planner.method import Batch, Method
from sharding.planner.models import PRESETS
from sharding.planner.search import Choices, Plan, best_plan
from sharding.planner.validation.evidence import EVIDENCE, Evidence

BLACKWELL = ("b200", "gb200", "b300")
DISPATCHES = {"Megatron-Core": ("ragged", "deepep")}
"""Dispatches of a program that has more than one."""

MEDIAN, WORST, RANKS = 0.15, 0.40, 0.8
"""Goals: median and largest relative error of rows that nothing was fitted to, and least rank
correlation of the rows of a model."""
Row = tuple[float, float, bool, Hashable]
"""Measured and predicted speed, true if used for fitting, and the cluster with its task."""


def system_of(name: str, hardware: str) -> System:
    """A system with its efficiency on a type of device.

    Efficiency is that of the one fitted row of the system on Blackwell, or on other devices. The
    experts of AutoModel and MaxText are one product, which the host launches at once.
    """
    if name == "MegaScale-MoE":
        return fit(name)
    is_blackwell, waits = hardware in BLACKWELL, "FSDP" in name
    return _megatron_or_other(name.removesuffix(" with FSDP"), is_blackwell, waits)


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

    def is_slower(efficiency: float) -> bool:
        step = cost_of(point, replace(system, efficiency=efficiency))
        assert step is not None
        return tokens_per_second(point, step) < point.tokens_per_second

    return replace(system, efficiency=bisect(is_slower, 0.05, 1.5, 30))


def tokens_per_second(row: Evidence, step: Cost) -> float:
    """Predicted tokens per second of one device."""
    return row.rows * row.time / step.total / row.num_devices


@functools.cache
def predict(row: Evidence) -> float | None:
    """Predicted tokens per second of one device; None where nothing fits in its memory."""
    step = cost_of(row, system_of(row.system, row.hardware))
    return None if step is None else tokens_per_second(row, step)


def cost_of(row: Evidence, system: System) -> Cost | None:
    """Time of a step with a row's settings; those that are not published are chosen."""
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


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on the rows of a model.

    Attributes:
      rows: number of rows, and of those that nothing was fitted to.
      median, worst: relative errors of the latter; None without any.
      correlation: Spearman's rank correlation of all; None with fewer than three.
      on_cluster: mean of the correlations of rows on equal clusters, weighted by their number: of
        layouts that a user would choose from. None without three such rows.
    """

    rows: tuple[int, int]
    median: float | None
    worst: float | None
    correlation: float | None
    on_cluster: float | None

    @property
    def verdict(self) -> str:
        """Judgement in words."""
        if self.median is None or self.worst is None or self.correlation is None:
            return "too few rows"
        is_close = self.median < MEDIAN and self.worst < WORST
        if min(self.correlation, 1.0 if self.on_cluster is None else self.on_cluster) <= RANKS:
            return "do not rank these"
        return "holds" if is_close else "ranks hold, speeds do not"


def accuracy_of(rows: Sequence[Row]) -> Accuracy:
    errors = [
        abs(predicted / measured - 1) for measured, predicted, fitted, _ in rows if not fitted
    ]
    clusters = defaultdict[Hashable, list[Row]](list)
    for row in rows:
        clusters[row[3]].append(row)
    comparable = [group for group in clusters.values() if len(group) > 2]
    on_cluster = None
    if comparable:
        total = sum(len(group) * _correlation(group) for group in comparable)
        on_cluster = total / sum(map(len, comparable))
    return Accuracy(
        (len(rows), len(errors)),
        statistics.median(errors) if errors else None,
        max(errors, default=None),
        _correlation(rows) if len(rows) > 2 else None,
        on_cluster,
    )


def _correlation(rows: Sequence[Row]) -> float:
    return rank_correlation([row[0] for row in rows], [row[1] for row in rows])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
