"""Report of a search: a table and a picture of its plans, and what rules out their neighbours."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe.planner.cost import Cost
from moe.planner.models import ModelSizes
from moe.planner.search import MEMORY_FRACTION, Plan, SearchResult, broken_rule
from sharding.costs.hardware import Hardware
from sharding.folding import Layout

COLUMNS = ("layout", "dispatch", "context", "remat", "rows", "step", "MFU", "memory")
COMPONENTS = ("products", "traffic", "sent", "bubble")
MEMORY = ("weights", "optimizer", "gradients", "activations", "buffers")


def plan_row(plan: Plan, hardware: Hardware) -> list[str]:
    """A plan as text, under `COLUMNS` and `COMPONENTS`."""
    cost = plan.cost
    shares = cost.products, cost.traffic, cost.exposed, cost.bubble
    halved = len(plan.method.streams(plan.batch)) > 1
    return [
        str(plan.layout),
        _dispatch_text(plan),
        plan.method.context if plan.layout.cp > 1 else "-",
        plan.method.execution.remat,
        f"{plan.batch.micro_rows}{' in two batches' if halved else ''}",
        f"{cost.total:.3g} s",
        f"{cost.mfu(hardware):.1%}",
        f"{plan.memory.total / 1e9:.3g} GB",
        *(f"{seconds / cost.total:.0%}" for seconds in shares),
    ]


def _dispatch_text(plan: Plan) -> str:
    """Dispatch method, communication dtype and number of chunks, if any is set."""
    method, execution = plan.method, plan.method.execution
    if plan.layout.ep * plan.layout.etp == 1:
        return "-"
    comm_dtype = "" if execution.activation_wire is None else " fp8"
    chunks = "" if execution.num_chunks == 1 else f" x{execution.num_chunks}"
    return method.dispatch + comm_dtype + chunks


def report(
    result: SearchResult, model: ModelSizes, rows: int, time: int, hardware: Hardware, top: int = 8
) -> str:
    """The best plans, time and memory of the best by component, and drawbacks of its neighbours."""
    rows_of_plans = [plan_row(plan, hardware) for plan in result.plans[:top]]
    lines = [align_columns([[*COLUMNS, *COMPONENTS], *rows_of_plans])]
    best = result.plans[0]
    if best.method.gradient_wire != "float32":
        lines += ["", f"The first layout sends gradients in {best.method.gradient_wire}."]
    if best.method.execution.overlap_grad_reduce:
        lines += ["", "The first layout reduces gradients inside the backward pass."]
    sent = sorted(best.cost.communication.items(), key=lambda item: -item[1])
    shown = [[f"  {what}", f"{time:.3g} s"] for what, time in sent if time > 0]
    if shown:
        lines += ["", "Exposed communication of the first layout, per step:", align_columns(shown)]
    memory = best.memory
    memory_rows = [[f"  {name}", f"{getattr(memory, name) / 1e9:.3g} GB"] for name in MEMORY]
    budget = f"{MEMORY_FRACTION * hardware.memory / 1e9:.3g} GB budget"
    lines += ["", f"Memory of the first layout per device ({budget}):", align_columns(memory_rows)]
    against = why_not(result, model, rows, time, hardware)
    reasons = [[f"  {replace(layout, vpp=1)}", reason] for layout, reason in against.items()]
    if reasons:
        lines += ["", "Drawbacks of neighbouring layouts:", align_columns(reasons)]
    num_plans, num_illegal = len(result.plans), result.illegal.total()
    lines += [
        "",
        f"{num_plans} layouts fit, {len(result.too_large)} need more memory, {num_illegal} are "
        "not valid.",
    ]
    return "\n".join(lines)


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def neighbours(layout: Layout) -> list[Layout]:
    """Layouts of as many devices in which a factor of two moves from one axis to another."""
    changes = [
        {less: getattr(layout, less) // 2, more: getattr(layout, more) * 2}
        for less, more in itertools.permutations(("tp", "cp", "dp", "pp"), 2)
        if getattr(layout, less) % 2 == 0
    ]
    for axis in ("ep", "etp"):
        size = getattr(layout, axis)
        changes.append({axis: size * 2})
        if size % 2 == 0:
            changes.append({axis: size // 2})
    if layout.ep % 2 == 0:
        changes.append({"ep": layout.ep // 2, "etp": layout.etp * 2})
    candidates = [_replace_sizes(layout, **sizes) for sizes in changes]
    return [candidate for candidate in dict.fromkeys(candidates) if candidate is not None]


def _replace_sizes(layout: Layout, **sizes: int) -> Layout | None:
    try:
        return replace(layout, vpp=1, **sizes)
    except ValueError:
        return None


def why_not(
    result: SearchResult, model: ModelSizes, rows: int, time: int, hardware: Hardware
) -> dict[Layout, str]:
    """Reason against each neighbour of the best layout that is illegal or was searched."""
    best = result.plans[0]
    by_layout = {replace(plan.layout, vpp=1): plan for plan in result.plans}
    reasons = {}
    for other in neighbours(best.layout):
        rule = broken_rule(model, other, rows, time)
        if rule is not None:
            reasons[other] = rule
        elif other in by_layout:
            reasons[other] = _describe_slowdown(by_layout[other], best)
        elif other in result.too_large:
            needs, has = result.too_large[other] / 1e9, MEMORY_FRACTION * hardware.memory / 1e9
            reasons[other] = f"needs {needs:.0f} GB, budget {has:.0f} GB"
    return reasons


def _describe_slowdown(plan: Plan, best: Plan) -> str:
    """Text: by how much a plan is slower, and the component of its time that grew most."""

    def components(cost: Cost) -> dict[str, float]:
        return {
            "products": cost.products,
            "memory traffic": cost.traffic,
            "pipeline bubble": cost.bubble,
            **cost.communication,
        }

    best_seconds, other_seconds = components(best.cost), components(plan.cost)
    grown = {
        name: other_seconds.get(name, 0.0) - best_seconds.get(name, 0.0)
        for name in best_seconds | other_seconds
    }
    worst = max(grown, key=lambda name: grown[name])
    return f"{plan.cost.total / best.cost.total - 1:.0%} slower: {worst}"


def draw(plans: Sequence[Plan], hardware: Hardware, path: Path, title: str) -> None:
    """Draws a bar of time and one of memory for each plan, the fastest on top.

    Args:
      path: where the picture goes; the suffix decides its format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.4 + 0.42 * len(plans)), layout="constrained")
    figure.suptitle(title)
    time, memory = figure.subplots(1, 2, sharey=True)
    names = dict.fromkeys(
        name for plan in plans for name, seconds in plan.cost.communication.items() if seconds
    )
    time_components = {
        "products": [plan.cost.products for plan in plans],
        "memory traffic": [plan.cost.traffic for plan in plans],
        **{name: [plan.cost.communication.get(name, 0.0) for plan in plans] for name in names},
        "pipeline bubble": [plan.cost.bubble for plan in plans],
    }
    labels, budget = [str(plan.layout) for plan in plans], MEMORY_FRACTION * hardware.memory / 1e9
    _stack(time, labels, time_components)
    time.set_xlabel("seconds per step")
    gigabytes = {name: [getattr(plan.memory, name) / 1e9 for plan in plans] for name in MEMORY}
    _stack(memory, labels, gigabytes)
    memory.axvline(budget, color="0.2", linestyle="--", linewidth=1)
    memory.set_xlabel(f"GB per device; dashed line: memory budget on {hardware.name}")
    time.invert_yaxis()
    figure.savefig(path, dpi=120)


def _stack(axes, labels: Sequence[str], components: dict[str, list[float]]) -> None:
    from matplotlib import colormaps

    left = [0.0] * len(labels)
    for index, (name, sizes) in enumerate(components.items()):
        colour = colormaps["tab10"](index % 10)
        axes.barh(labels, sizes, left=left, label=name, color=colour, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
    axes.tick_params(labelsize=8)
