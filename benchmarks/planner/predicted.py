"""Predicted speeds of published measurements, with the settings that these were made with, and the
accuracy of the predictions: errors, and rank correlations of models."""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from benchmarks.planner.calibration import bisect, fit
from benchmarks.planner.evidence import DEVICES, EVIDENCE, Evidence
from moe.planner.cost import BLACKWELL, METHODS, Cost, System, cost
from moe.planner.memory import memory
from moe.planner.method import Batch, Method, with_fields
from moe.planner.models import PRESETS
from moe.planner.search import Choices, Plan, best_plan
from sharding.folding import Layout

MEDIAN, WORST, RANKS = 0.15, 0.40, 0.8
"""Goals: median and largest relative error of rows that nothing was fitted to, and least rank
correlation of the rows of a model."""
Row = tuple[float, float, bool, Hashable]
"""Measured and predicted speed, true if used for fitting, and the cluster with its task."""


WAITS = (("MaxText", "v6e", False),)
"""Programs, devices and kinds of models (True has experts) that wait for shards of weights. The two
fitted rows of dense models, with batches of different sizes, are then 3% apart, and without waiting
11%. Mixtures there are faster than waiting would allow."""


def system_of(name: str, hardware: str, has_experts: bool) -> System:
    """A system with its efficiency on a type of device, for a dense model or one with experts.

    Efficiency is that of the fitted rows of the program that are most alike: on the device, then on
    its generation, then on any, each first of the same kind of model. The experts of all programs
    but Megatron-Core are one product, which the host launches at once.
    """
    program = name.removesuffix(" with FSDP")
    if name == "MegaScale-MoE":
        return fit(name)
    system = fit("Megatron-Core")
    if program != "Megatron-Core" or hardware in BLACKWELL:
        system = _fitted(program, hardware, has_experts)
    waits = "FSDP" in name or (name, hardware, has_experts) in WAITS
    return replace(system, hides_shards=not waits)


@functools.cache
def _fitted(program: str, hardware: str, has_experts: bool) -> System:
    """Efficiency and share under tensor parallelism, from the rows that are most alike.

    If there are rows with and without ``tp``, efficiency is that of the latter, and the share, 1 at
    most, that of the former; else efficiency is that of all.
    """
    system = fit("Megatron-Core")
    if program != "Megatron-Core":
        system = replace(system, launch=0.0)
    points = _most_alike(program, hardware, has_experts)
    whole = [row for row in points if Layout.parse(row.layout).tp == 1]
    cut = [row for row in points if row not in whole]
    if whole and cut:
        by_whole = _with_field(system, "efficiency", whole, 0.05, 1.5)
        found = _with_field(by_whole, "tensor_share", cut, 0.1, 2.0)
        if found.tensor_share < 1:
            return found
    return _with_field(system, "efficiency", points, 0.05, 1.5)


def _has_experts(row: Evidence) -> bool:
    return PRESETS[row.model].num_experts > 0


def _most_alike(program: str, hardware: str, has_experts: bool) -> list[Evidence]:
    points = [row for row in EVIDENCE if row.fitted and row.system == program]

    def likeness(row: Evidence) -> tuple[bool, bool, bool]:
        is_kind = _has_experts(row) == has_experts
        same_generation = (row.hardware in BLACKWELL) == (hardware in BLACKWELL)
        return same_generation, is_kind, row.hardware == hardware

    best = max(map(likeness, points))
    return [row for row in points if likeness(row) == best]


def _with_field(
    system: System, name: str, points: Sequence[Evidence], low: float, high: float
) -> System:
    """The system with the number in a field that predicts the points on average."""

    def is_slower(value: float) -> bool:
        ratios = []
        for point in points:
            waits = (point.system, point.hardware, _has_experts(point)) in WAITS
            step = cost_of(point, replace(system, hides_shards=not waits, **{name: value}))
            assert step is not None
            ratios.append(tokens_per_second(point, step) / point.tokens_per_second)
        return math.prod(ratios) < 1

    return replace(system, **{name: bisect(is_slower, low, high, 30)})


def tokens_per_second(row: Evidence, step: Cost) -> float:
    """Predicted tokens per second of one device."""
    return row.rows * row.time / step.total / row.num_devices


@functools.cache
def predict(row: Evidence) -> float | None:
    """Predicted tokens per second of one device; None where nothing fits in its memory."""
    step = cost_of(row, system_of(row.system, row.hardware, _has_experts(row)))
    return None if step is None else tokens_per_second(row, step)


def cost_of(row: Evidence, system: System) -> Cost | None:
    """Time of a step with a row's settings; those that are not published are chosen."""
    model, hardware, layout = PRESETS[row.model], DEVICES[row.hardware], Layout.parse(row.layout)
    system = replace(system, hides_experts=row.overlaps_experts)
    if row.graphs:
        system = replace(system, launch=0.0)
    method = method_of(row)
    if row.micro_rows is not None:
        batch = Batch(row.rows, row.time, row.micro_rows)
        if row.remat is None:
            fitting = (
                each
                for each in (with_fields(method, remat=remat) for remat in Choices().remat)
                if memory(model, layout, batch, each).total <= hardware.memory
            )
            method = next(fitting, with_fields(method, remat="full"))
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
    method = replace(method, reshards=row.fsdp)
    if row.micro_rows is None:
        return method
    method = replace(method, deepep_block=row.expert_block, repeats_experts=row.repeats_experts)
    return with_fields(method, dispatch=row.dispatch, remat=row.remat or "none")


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
