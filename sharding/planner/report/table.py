"""Report of a search as text."""

from collections.abc import Sequence
from dataclasses import replace

from sharding.planner.hardware import Hardware
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.report.columns import aligned
from sharding.planner.search import MEMORY_FRACTION, Found, Plan, why_not

COLUMNS = ("layout", "dispatch", "context", "remat", "rows", "step", "MFU", "memory")
PARTS = ("products", "traffic", "sent", "bubble")


def rows_of(plans: Sequence[Plan], hardware: Hardware) -> list[list[str]]:
    """A row of text for each plan, under `COLUMNS` and `PARTS`."""
    return [
        [
            _layout(plan),
            _dispatch(plan),
            plan.method.context if plan.layout.cp > 1 else "-",
            plan.method.remat,
            _rows(plan),
            f"{plan.cost.total:.3g} s",
            f"{plan.cost.mfu(hardware):.1%}",
            f"{plan.memory.total / 1e9:.3g} GB",
            *(f"{seconds / plan.cost.total:.0%}" for seconds in _parts(plan)),
        ]
        for plan in plans
    ]


def _parts(plan: Plan) -> tuple[float, ...]:
    cost = plan.cost
    return cost.products, cost.traffic, cost.exposed, cost.bubble


def _dispatch(plan: Plan) -> str:
    """Dispatch method, with communication dtype and number of chunks where not the default."""
    method = plan.method
    if plan.layout.ep * plan.layout.etp == 1:
        return "-"
    wire = "" if method.activation_wire is None else " fp8"
    chunks = "" if method.expert_chunks == 1 else f" x{method.expert_chunks}"
    return method.dispatch + wire + chunks


def _rows(plan: Plan) -> str:
    """Rows of a micro-batch, and a note if they are halved."""
    halved = len(plan.method.streams(plan.batch)) > 1
    return f"{plan.batch.micro_rows}{' in halves' if halved else ''}"


def _layout(plan: Plan) -> str:
    return str(plan.layout)


def report(
    found: Found, model: ModelSizes, rows: int, time: int, hardware: Hardware, top: int = 8
) -> str:
    """The best plans, time and memory of the best by component, and drawbacks of its neighbours."""
    lines = [aligned([[*COLUMNS, *PARTS], *rows_of(found.plans[:top], hardware)])]
    best = found.plans[0]
    if best.method.gradient_wire != "float32":
        lines += ["", f"Gradients of the first are sent in {best.method.gradient_wire}."]
    if best.method.overlap_grad_reduce:
        lines += ["", "Gradients of the first are summed inside the backward pass."]
    sent = sorted(best.cost.communication.items(), key=lambda item: -item[1])
    shown = [[f"  {what}", f"{time:.3g} s"] for what, time in sent if time > 0]
    if shown:
        lines += ["", "Communication of the first that nothing hides, in a step:", aligned(shown)]
    memory = best.memory
    parts = [
        [f"  {name}", f"{getattr(memory, name) / 1e9:.3g} GB"]
        for name in ("weights", "optimizer", "gradients", "activations", "buffers")
    ]
    has = f"{MEMORY_FRACTION * hardware.memory / 1e9:.3g} GB are planned with"
    lines += ["", f"Memory of the first on each device ({has}):", aligned(parts)]
    against = why_not(found, model, rows, time, hardware)
    reasons = [[f"  {replace(layout, vpp=1)}", reason] for layout, reason in against.items()]
    if reasons:
        lines += ["", "Why not its neighbours:", aligned(reasons)]
    number = len(found.plans)
    left_out = sum(found.illegal.values())
    lines += [
        "",
        f"{number} layouts fit, {len(found.too_large)} need more memory, {left_out} are not legal.",
    ]
    return "\n".join(lines)
