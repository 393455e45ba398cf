"""Report of a server's plan: its constraints, reasons against others, a picture of its timeline."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.planner.serving import colocated
from benchmarks.planner.serving.pingpong import (
    STATIONS,
    micro_batches_needed,
    order_visits,
    simulate,
)
from benchmarks.planner.serving.plan import Server, Shape
from benchmarks.planner.serving.search import ServingPlan, describe, largest_batch
from moe.planner.report import align_columns

COLUMNS = (
    *("attention", "experts", "m", "batch", "T_a", "T_e", "T_c", "between", "tokens/s"),
    *("per device", "per cost", "prompts"),
)
TIMELINE_LAYERS = 3


def row_of(plan: ServingPlan) -> list[str]:
    """A row of text under `COLUMNS`."""
    attention, experts, sending = plan.layer
    shape, pair = plan.shape, plan.pair
    experts_text = f" of {shape.experts_of_node}" if shape.experts_of_node > 1 else ""
    nodes = int(plan.devices[1]) // shape.tp_experts
    return [
        f"{shape.attention_nodes} x {pair.attention.name} tp{shape.tp_attention}",
        f"{nodes} x {pair.experts.name} tp{shape.tp_experts}{experts_text}",
        str(shape.micro_batches),
        f"{plan.sequences:,}",
        *(f"{time * 1e6:.0f} us" for time in (attention, experts, sending)),
        f"{plan.token_latency * 1e3:.1f} ms",
        f"{plan.throughput:,.0f}",
        f"{plan.per_device:,.0f}",
        f"{plan.per_cost:,.0f}",
        plan.prefill,
    ]


def constraints(plan: ServingPlan) -> list[list[str]]:
    """The paper's eight constraints, with the plan's numbers."""
    shape, (attention, experts, sending) = plan.shape, plan.layer
    server, num_layers = plan.server, plan.server.model.num_layers
    busier, m = max(attention, experts), shape.micro_batches
    need = micro_batches_needed(attention, experts, sending)
    least = attention + experts + 2 * sending + m * busier * (num_layers - 1)
    most = server.most_in_memory()
    sent, received = server.message_bytes(plan.batch, shape.attention_nodes)
    return [
        ["(1) T_a ~ T_e", f"{attention / experts:.2f}, k1 E / (k3 K) = {plan.balance:.1f}"],
        ["(2) T_c < T_f", f"T_c is {sending / busier:.2f} T_f"],
        ["(3) m T_f >= T_a + T_e + 2 T_c", f"m = {m}, {need} needed"],
        ["(4) T_iter", f"{least * 1e3:.1f} to {m * busier * num_layers * 1e3:.1f} ms"],
        ["(5) T_total", f"{plan.total * 1e3:.1f} ms for {plan.sequences:,} tokens"],
        ["(6) T_c", f"{sent / 1e6:.2f} MB per sender, {received / 1e6:.2f} MB per receiver"],
        ["(7) T_iter <= SLO", f"{plan.token_latency * 1e3:.1f} of {server.load.slo * 1e3:g} ms"],
        ["(8) memory", f"{plan.batch * m:,} of {most:,} sequences per attention node"],
    ]


def neighbours(shape: Shape) -> list[tuple[str, Shape]]:
    """Shapes that differ in one size."""
    nodes, m = shape.attention_nodes, shape.micro_batches
    steps = (
        ("tp_a", "tp_attention", (shape.tp_attention // 2, shape.tp_attention * 2)),
        ("tp_e", "tp_experts", (shape.tp_experts // 2, shape.tp_experts * 2)),
        ("n_a", "attention_nodes", (nodes - 1, nodes + 1)),
        ("m", "micro_batches", (m - 1, m + 1)),
    )
    shapes = [
        (f"{title} {size}", replace(shape, **{name: size}))
        for title, name, sizes in steps
        for size in sizes
        if size >= 1
    ]
    per_node = shape.experts_of_node * 2
    return [*shapes, (f"{per_node} experts per node", replace(shape, experts_of_node=per_node))]


def why_not(plan: ServingPlan) -> list[list[str]]:
    """Reason against each neighbour: a constraint, or its tokens per second for the price."""
    return [[title, _reason_against(plan, shape)] for title, shape in neighbours(plan.shape)]


def _reason_against(plan: ServingPlan, shape: Shape) -> str:
    model, load = plan.server.model, plan.server.load
    tp_attention, tp_experts = shape.tp_attention, shape.tp_experts
    domains = plan.pair.attention.domain, plan.pair.experts.domain
    if model.num_kv_heads % tp_attention or tp_attention > domains[0]:
        return "tp_a must divide the key/value heads and fit a server"
    if model.d_expert % tp_experts or tp_experts > domains[1]:
        return "tp_e must divide the hidden units and fit a server"
    if model.num_experts % shape.experts_of_node:
        return "must divide the experts"
    server = Server(model, load, plan.pair, tp_attention, tp_experts, shape.experts_of_node)
    if not server.weights_fit():
        return "does not fit"
    nodes, m = shape.attention_nodes, shape.micro_batches
    batch = int(largest_batch(server, np.array([nodes]), m, plan.prefill)[0])
    if not batch:
        return "no batch meets the time limit"
    other = describe(server, nodes, m, batch, plan.prefill)
    gain, slowest = other.per_cost / plan.per_cost - 1, max(other.layer) * 1e6
    violates = "" if server.hides(batch, nodes, m) else ", violates (2) or (3)"
    return f"{gain:+.1%}, {slowest:.0f} us per layer{violates}"


def colocated_rows(plan: ServingPlan) -> list[list[str]]:
    """The plan over the best co-located one of each kind on either device, for the price."""
    rows, pair, server = [], plan.pair, plan.server
    price_of = dict(zip((pair.attention, pair.experts), pair.prices, strict=True))
    for (hardware, price), (title, kind) in product(price_of.items(), colocated.PLAN_KINDS.items()):
        best = colocated.best_colocated(
            server.model, server.load, hardware, pair.efficiency, kind=kind
        )
        cells = ["does not fit or exceeds the time limit", "", ""]
        if best is not None:
            per_cost = best.per_device / price
            cells = [str(best), f"{per_cost:,.0f}", f"{plan.per_cost / per_cost:.2f}"]
        rows.append([hardware.name, title, *cells])
    return [["on", "co-located", "plan", "per cost", "gain"], *rows]


def report(plans: Sequence[ServingPlan]) -> str:
    """The best plan of each pair of devices, and all about the first."""
    best = plans[0]
    limit = {"memory": "memory (8)", "time between tokens": "the SLO (7)"}
    lines = [
        align_columns([COLUMNS, *map(row_of, plans)]),
        "",
        f"The first plan; {limit.get(best.limit, 'communication (2, 3)')} limits its batch:",
        align_columns([[f"  {name}", value] for name, value in constraints(best)]),
        "",
        "Drawbacks of neighbouring plans:",
        align_columns([[f"  {name}", value] for name, value in why_not(best)]),
    ]
    if best.devices[2]:
        lines += ["", f"Prefill needs {best.devices[2]:.1f} devices more."]
    if best.prefill == "elsewhere":
        lines += ["", "Gain over co-located plans, tokens per second per price:"]
        lines += [align_columns([[f"  {row[0]}", *row[1:]] for row in colocated_rows(best)])]
    return "\n".join(lines)


def draw_timeline(plan: ServingPlan, path: Path, title: str) -> None:
    """Draws the first layers of a token step: a row for each station, a bar for each visit.

    A bar has the colour of its micro-batch.

    Args:
      path: where the picture goes; the suffix decides its format.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    attention, experts, sending = plan.layer
    lasts = (attention, sending, experts, sending)
    starts = simulate(attention, experts, sending, plan.shape.micro_batches, TIMELINE_LAYERS)
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots()
    for visit in order_visits(TIMELINE_LAYERS, plan.shape.micro_batches):
        layer, micro_batch, station = visit.layer, visit.micro_batch, STATIONS.index(visit.station)
        start, width = float(starts[layer, micro_batch, station]), lasts[station] * 1e3
        colour = colormaps["tab10"](micro_batch)
        axes.barh(station, width, left=start * 1e3, height=0.7, color=colour, edgecolor="white")
        middle = start * 1e3 + width / 2
        axes.text(middle, station, f"{layer}.{micro_batch}", ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(STATIONS)), STATIONS)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds; layer and micro-batch in the bars")
    axes.set_title(title)
    figure.savefig(path, dpi=120)
