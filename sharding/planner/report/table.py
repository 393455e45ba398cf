"""Report of a search as text."""

from collections.abc import Sequence
from dataclasses import replace

from sharding.planner.hardware import Hardware
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.report.columns import align_columns
from sharding.planner.search import MEMORY_FRACTION, Plan, SearchResult, why_not

COLUMNS = ("layout", "dispatch", "context", "remat", "rows", "step", "MFU", "memory")
COMPONENTS = ("products", "traffic", "sent", "bubble")


def rows_of(plans: Sequence[Plan], hardware: Hardware) -> list[list[str]]:
    """A row of text for each plan, under `COLUMNS` and `COMPONENTS`."""
    return [
        [
            _layout_text(plan),
            _dispatch_text(plan),
            plan.method.context if plan.layout.cp > 1 else "-",
            plan.method.remat,
            _rows_text(plan),
            f"{plan.cost.total:.3g} s",
            f"{plan.cost.mfu(hardware):.1%}",
            f"{plan.memory.total / 1e9:.3g} GB",
            *(f"{seconds / plan.cost.total:.0%}" for seconds in _components(plan)),
        ]
        for plan in plans
    ]


def _components(plan: Plan) -> tuple[float, ...]:
    cost = plan.cost
    return cost.products, cost.traffic, cost.exposed, cost.bubble


def _dispatch_text(plan: Plan) -> str:
    """Dispatch method, with communication dtype and number of chunks where not the default."""
    method = plan.method
    if plan.layout.ep * plan.layout.etp == 1:
        return "-"
    comm_dtype = "" if method.activation_wire is None else " fp8"
    chunks = "" if method.expert_chunks == 1 else f" x{method.expert_chunks}"
    return method.dispatch + comm_dtype + chunks


def _rows_text(plan: Plan) -> str:
    """Rows of a micro-batch, and a note if they are halved."""
    halved = len(plan.method.streams(plan.batch)) > 1
    return f"{plan.batch.micro_rows}{' in two batches' if halved else ''}"


def _layout_text(plan: Plan) -> str:
    return str(plan.layout)


def report(
    result: SearchResult, model: ModelSizes, rows: int, time: int, hardware: Hardware, top: int = 8
) -> str:
    """The best plans, time and memory of the best by component, and drawbacks of its neighbours."""
    lines = [align_columns([[*COLUMNS, *COMPONENTS], *rows_of(result.plans[:top], hardware)])]
    best = result.plans[0]
    if best.method.gradient_wire != "float32":
        lines += ["", f"The first layout sends gradients in {best.method.gradient_wire}."]
    if best.method.overlap_grad_reduce:
        lines += ["", "The first layout reduces gradients inside the backward pass."]
    sent = sorted(best.cost.communication.items(), key=lambda item: -item[1])
    shown = [[f"  {what}", f"{time:.3g} s"] for what, time in sent if time > 0]
    if shown:
        lines += [
            "",
            "Exposed communication of the first layout, per step:",
            align_columns(shown),
        ]
    memory = best.memory
    memory_rows = [
        [f"  {name}", f"{getattr(memory, name) / 1e9:.3g} GB"]
        for name in ("weights", "optimizer", "gradients", "activations", "buffers")
    ]
    budget = f"{MEMORY_FRACTION * hardware.memory / 1e9:.3g} GB budget"
    lines += ["", f"Memory of the first layout per device ({budget}):", align_columns(memory_rows)]
    against = why_not(result, model, rows, time, hardware)
    reasons = [[f"  {replace(layout, vpp=1)}", reason] for layout, reason in against.items()]
    if reasons:
        lines += ["", "Drawbacks of neighbouring layouts:", align_columns(reasons)]
    num_plans = len(result.plans)
    num_illegal = sum(result.illegal.values())
    lines += [
        "",
        f"{num_plans} layouts fit, {len(result.too_large)} need more memory, {num_illegal} are "
        "not valid.",
    ]
    return "\n".join(lines)
