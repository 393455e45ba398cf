"""Published measurements of two papers, compared with the planner after calibration.

``python -m benchmarks.planner.calibration`` prints both side by side.
"""

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from moe.planner.cost import METHODS, SYSTEMS, System
from moe.planner.models import PRESETS
from moe.planner.report import align_columns
from moe.planner.search import Choices, Plan, best_plan
from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout


@dataclass(frozen=True)
class Row:
    """A measurement.

    Attributes:
      system: whose program, one of `moe.planner.cost.SYSTEMS`.
      model: one of `PRESETS`.
      layout: its mapping. Neither paper gives ``vpp``: the one that the planner finds best.
      rows: sequences of a step.
      time: tokens of each.
      mfu: model FLOPs utilisation, percent; None ran out of memory.
      fsdp: weights in shards.
    """

    system: str
    model: str
    layout: str
    rows: int
    time: int
    mfu: float | None
    fsdp: bool = False


# Liu et al., "MoE Parallel Folding", 2025, tables 1 and 3: FSDP with expert parallelism, tensor and
# expert parallelism with ZeRO-1, Megatron-Core, and Megatron-Core with folding. Without folding
# experts are cut as attention is: etp = tp.
MAPPINGS = {
    model: [
        Row("Megatron-Core", model, layout, 256, 4096, mfu, fsdp=index == 0)
        for index, (layout, mfu) in enumerate(rows)
    ]
    for model, rows in {
        "mixtral-8x22b": (
            ("tp2 dp64 / ep8 etp2", 23.4),
            ("tp4 dp32 / ep8 etp4", 36.6),
            ("tp2 dp8 pp8 / ep4 etp2", 46.3),
            ("tp2 dp8 pp8 / ep8", 49.3),
        ),
        "qwen2-57b-a14b": (
            ("dp64 / ep8", 25.4),
            ("tp4 dp16 / ep4 etp4", 23.1),
            ("tp2 dp8 pp4 / ep4 etp2", 35.3),
            ("tp2 dp8 pp4 / ep4", 39.0),
        ),
        "mixtral-8x22b-g8t8": (
            ("tp4 dp32 / ep8 etp4", 9.0),
            ("tp8 dp16 / ep8 etp8", 8.7),
            ("tp2 dp8 pp8 / ep8 etp2", 17.1),
            ("tp4 dp4 pp8 / ep8", 28.8),
        ),
        "llama3-8x70b": (
            ("tp8 dp32 / ep8 etp8", 19.6),
            ("tp8 dp32 / ep8 etp8", None),
            ("tp8 dp4 pp8 / ep4 etp8", 38.8),
            ("tp8 dp2 pp16 / ep8", 41.6),
        ),
    }.items()
}
# Table 4 of the same, with folding: on 64 or 128 devices, and each time on twice as many.
SCALING = {
    model: [
        Row("Megatron-Core", model, str(replace(layout, dp=layout.dp * 2**times)), 1024, 4096, mfu)
        for times, mfu in enumerate(rates)
    ]
    for model, layout, rates in (
        ("mixtral-8x22b", Layout(tp=2, dp=8, pp=8, ep=8), (52.2, 50.7, 48.9, 44.9)),
        ("qwen2-57b-a14b", Layout(tp=2, dp=8, pp=4, ep=4), (39.9, 39.7, 38.1, 36.6, 33.4)),
        ("mixtral-8x22b-g8t8", Layout(tp=4, dp=4, pp=8, ep=8), (30.0, 29.3, 26.7, 25.5)),
    )
}
# Jin et al., "MegaScale-MoE", 2025, table 3: Ulysses attention and experts inside a server.
MEGASCALE = [
    Row("MegaScale-MoE", "megascale-352b", f"cp8 dp{devices // 120} pp15 / ep8", 720, 8192, mfu)
    for devices, mfu in ((240, 32.48), (480, 29.67), (720, 29.36), (960, 28.67), (1440, 27.92))
]

CLUSTERS = {"Megatron-Core": HARDWARE["h100"], "MegaScale-MoE": HARDWARE["h800"]}
CALIBRATION_POINTS = {"Megatron-Core": MAPPINGS["mixtral-8x22b"][-1], "MegaScale-MoE": MEGASCALE[0]}
"""The one measurement that each system's `System.efficiency` is taken from."""
LAUNCH_POINTS = (MAPPINGS["qwen2-57b-a14b"][-1], MAPPINGS["mixtral-8x22b-g8t8"][-1])
"""Measurements with many experts on a device, which `System.launch` is taken from."""


def is_fitted(row: Row) -> bool:
    """True if something is fitted to a row; with sharded weights, that they are waited for."""
    return row in (*CALIBRATION_POINTS.values(), *LAUNCH_POINTS) or row.fsdp


def predict(row: Row, system: System) -> Plan | float:
    """The best plan for a row's layout, or the bytes that it needs at least.

    The paper's programs with sharded weights wait for them: so its four rows are predicted best.
    Neither paper gives virtual stages, rematerialisation and micro-batches: they are chosen.
    """
    method = METHODS[row.system]
    choices = Choices((method.dispatch,), (method.context,), (method.storage,))
    return best_plan(
        PRESETS[row.model],
        Layout.parse(row.layout),
        row.rows,
        row.time,
        CLUSTERS[row.system],
        replace(method, reshards=row.fsdp),
        replace(system, hides_shards=not row.fsdp),
        choices,
    )


def predicted_mfu(row: Row, system: System) -> float | None:
    """Model FLOPs utilisation in percent; None where it does not fit."""
    plan = predict(row, system)
    return 100 * plan.cost.mfu(CLUSTERS[row.system]) if isinstance(plan, Plan) else None


def mfu_ratio(row: Row, system: System) -> float:
    """Predicted over published utilisation."""
    mfu = predicted_mfu(row, system)
    assert mfu is not None
    assert row.mfu is not None
    return mfu / row.mfu


def bisect(is_below: Callable[[float], bool], low: float, high: float, steps: int) -> float:
    """The number between two bounds up to which `is_below` is true, by bisection."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return (low + high) / 2


@functools.cache
def calibrate(name: str) -> System:
    """The system with the efficiency that predicts the measurement of its `CALIBRATION_POINTS`."""
    row, system = CALIBRATION_POINTS[name], replace(SYSTEMS[name], launch=0.0)

    def is_slower(efficiency: float) -> bool:
        return mfu_ratio(row, replace(system, efficiency=efficiency)) < 1

    return replace(system, efficiency=bisect(is_slower, 0.05, 1.5, 40))


@functools.cache
def fit(name: str) -> System:
    """`calibrate`; for Megatron-Core with launches that predict `LAUNCH_POINTS` on average."""
    system = calibrate(name)
    if name != "Megatron-Core":
        return system

    def is_faster(launch: float) -> bool:
        changed = replace(system, launch=launch)
        return math.prod(mfu_ratio(row, changed) for row in LAUNCH_POINTS) >= 1

    return replace(system, launch=bisect(is_faster, 0.0, 1e-3, 20))


def comparison_table() -> str:
    """Table of every published row with its prediction."""
    lines = [
        f"{name}: GEMMs reach {calibrate(name).efficiency:.1%} of peak"
        for name in CALIBRATION_POINTS
    ]
    launch = fit("Megatron-Core").launch
    lines[0] += f"; a pass of a further expert of a device takes {1e6 * launch:.0f} us to launch"
    tables = {
        "Mappings (MoE Parallel Folding, tables 1 and 3)": [*chain(*MAPPINGS.values())],
        "Strong scaling with folding (table 4)": [*chain(*SCALING.values())],
        "Strong scaling (MegaScale-MoE, table 3)": MEGASCALE,
    }
    for title, rows in tables.items():
        cells = [("model", "layout", "vpp", "remat", "rows", "published MFU", "predicted")]
        cells += [_comparison_row(row) for row in rows]
        lines += ["", title, align_columns(cells)]
    return "\n".join(lines)


def _comparison_row(row: Row) -> tuple[str, ...]:
    plan = predict(row, fit(row.system))
    layout = row.layout + (", FSDP" if row.fsdp else "")
    published = "out of memory" if row.mfu is None else f"{row.mfu}"
    if not isinstance(plan, Plan):
        return row.model, layout, "", "", "", published, "does not fit"
    mfu = 100 * plan.cost.mfu(CLUSTERS[row.system])
    star = " (calibrated)" if is_fitted(row) else ""
    settings = str(plan.layout.vpp), plan.method.execution.remat, str(plan.batch.micro_rows)
    return row.model, layout, *settings, published, f"{mfu:.1f}{star}"


def main() -> None:
    """Prints the tables."""
    prog = "python -m benchmarks.planner.calibration"
    argparse.ArgumentParser(prog=prog, description=__doc__).parse_args()
    print(comparison_table())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
