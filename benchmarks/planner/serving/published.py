"""Published figures of MegaScale-Infer, compared with the planner's.

``python -m benchmarks.planner.serving.published`` prints both side by side.
"""

import argparse
import functools
from dataclasses import replace
from itertools import product

from benchmarks.planner.serving import colocated
from benchmarks.planner.serving.colocated import PlanKind
from benchmarks.planner.serving.pingpong import gain
from benchmarks.planner.serving.plan import DevicePair, Load
from benchmarks.planner.serving.search import ServingPlan, Space, best_serving_plan, search
from moe.planner.models import PRESETS
from moe.planner.report import align_columns
from sharding.costs.hardware import HARDWARE

MODELS = ("mixtral-8x22b", "dbrx", "scaled-moe")
SECOND_MICRO_BATCH_GAIN = 1.9
"""The published gain of a second micro-batch, about."""
THIRD_MICRO_BATCH_GAINS = {"mixtral-8x22b": 1.10, "dbrx": 1.28, "scaled-moe": 1.38}
PUBLISHED_PER_DEVICE = {"mixtral-8x22b": 1.28, "dbrx": 1.28, "scaled-moe": 1.90}
"""Decoded tokens per second and device over TensorRT-LLM, on 8 servers of 8 devices of 80 GB."""
PUBLISHED_PER_COST = 1.86
"""The same for the price, H20 with L40S over TensorRT-LLM on H20; the most of any model."""
VARIANTS = {
    "of the plan": {},
    "no latency": {"latency_outside": 0.0},
    "two adapters each": {"outside": 2 * HARDWARE["a800"].outside},
}
"""Changes of the adapters that were tried as causes of too large a ``T_c``."""
SLOS = (0.05, 0.075, 0.1, 0.15)
HOMOGENEOUS = HARDWARE["a800"]
H20 = replace(HARDWARE["h20"], outside=25e9)
"""Servers of H20 have four adapters of 400 Gb/s there."""


@functools.cache
def communication_ratio(name: str, variant: str = "of the plan") -> float:
    """``T_c / T_f`` of the best plan on the 64 devices of the paper; T_f is the busier group's."""
    device = replace(HOMOGENEOUS, **VARIANTS[variant])
    pair, space = DevicePair(device, device), Space(most_devices=64)
    plan = best_serving_plan(PRESETS[name], Load(), pair, space)
    assert plan is not None
    attention, experts, sending = plan.layer
    return sending / max(attention, experts)


def micro_batch_table() -> list[list[str]]:
    """Gains of micro-batches, published and by the simulator with the planner's own T_c / T_f."""
    rows = [["model", "T_c / T_f", "m = 2", "published", "m = 3", "published", "m = 4"]]
    for name in MODELS:
        ratio, layers = communication_ratio(name), PRESETS[name].num_layers
        second, third, fourth = (f"{gain(ratio, m, layers):.2f}" for m in (2, 3, 4))
        published = f"{SECOND_MICRO_BATCH_GAIN}", f"{THIRD_MICRO_BATCH_GAINS[name]:.2f}"
        rows.append([name, f"{ratio:.2f}", second, published[0], third, published[1], fourth])
    return rows


def ratio_table() -> list[list[str]]:
    """T_c / T_f with each of `VARIANTS`, and what the published third gain comes to, less one."""
    rows = [["model", *VARIANTS, "by the published gain"]]
    for name in MODELS:
        ratios = [f"{communication_ratio(name, variant):.2f}" for variant in VARIANTS]
        rows.append([name, *ratios, f"{THIRD_MICRO_BATCH_GAINS[name] - 1:.2f}"])
    return rows


def gains(name: str, slo: float) -> tuple[ServingPlan | None, list[colocated.Colocated | None]]:
    """The best plan on the 64 devices of the paper, and the best co-located one of each kind."""
    model, load = PRESETS[name], Load(slo=slo)
    pair = DevicePair(HOMOGENEOUS, HOMOGENEOUS)
    colocated_plans = [
        colocated.best_colocated(model, load, HOMOGENEOUS, kind=kind)
        for kind in colocated.PLAN_KINDS.values()
    ]
    return best_serving_plan(model, load, pair, Space(most_devices=64)), colocated_plans


def device_table() -> list[list[str]]:
    """Tokens per second and device, and the gain over each kind of co-located plan."""
    rows = [["model", "SLO", "disaggregated", "one group", "replicated", "overlapped", "published"]]
    for name in MODELS:
        for slo in SLOS:
            plan, others = gains(name, slo)
            published = f"{PUBLISHED_PER_DEVICE[name]:.2f}" if slo == Load().slo else ""
            throughput_text = "none" if plan is None else f"{plan.per_device:,.0f}"
            cells = [
                f"{plan.per_device / other.per_device:.2f}" if plan and other else "none"
                for other in others
            ]
            rows.append([name, f"{slo * 1000:g} ms", throughput_text, *cells, published])
    return rows


def cost_table() -> list[list[str]]:
    """H20 with L40S over the best co-located plan on H20, for the price."""
    rows = [["model", "attention", "experts", "per cost", "over H20 co-located", "published"]]
    devices = H20, HARDWARE["l40s"]
    price = {each.name: each.price or 1.0 for each in devices}
    pairs = [
        DevicePair(attention, experts, (price[attention.name], price[experts.name]))
        for attention, experts in product(devices, repeat=2)
    ]
    for name in MODELS:
        model, load = PRESETS[name], Load()
        plan = search(model, load, pairs)[0]
        baseline = colocated.best_colocated(model, load, H20, kind=PlanKind(wide=False))
        over = "none"
        if baseline is not None:
            over = f"{plan.per_cost / baseline.per_device * price['h20']:.2f}"
        names = plan.pair.attention.name, plan.pair.experts.name
        rows.append([name, *names, f"{plan.per_cost:,.0f}", over, f"up to {PUBLISHED_PER_COST}"])
    return rows


def comparison_tables() -> str:
    """All tables."""
    tables = {
        "Micro-batches, gain of one more": micro_batch_table(),
        "T_c / T_f, and with other adapters": ratio_table(),
        "One kind of device (a800), tokens/s per device and gain over co-located": device_table(),
        "Two kinds, tokens/s for the price of an L20": cost_table(),
    }
    return "\n\n".join(f"{title}\n{align_columns(rows)}" for title, rows in tables.items())


def main() -> None:
    """Prints the tables."""
    prog = "python -m benchmarks.planner.serving.published"
    argparse.ArgumentParser(prog=prog, description=__doc__).parse_args()
    print(comparison_tables())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
