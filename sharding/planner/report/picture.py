"""Picture of plans: their time and memory by component."""

from collections.abc import Sequence
from pathlib import Path

from sharding.planner.hardware import Hardware
from sharding.planner.search import MEMORY_FRACTION, Plan

MEMORY = ("weights", "optimizer", "gradients", "activations", "buffers")


def draw(plans: Sequence[Plan], hardware: Hardware, path: Path, title: str = "") -> None:
    """Draws a bar of time and one of memory for each plan, the fastest on top.

    Args:
      path: where the picture goes; the suffix decides its format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 2.4 + 0.42 * len(plans)), layout="constrained")
    if title:
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
    labels = [str(plan.layout) for plan in plans]
    _stack(time, labels, time_components)
    time.set_xlabel("seconds per step")
    memory_components = {
        name: [getattr(plan.memory, name) / 1e9 for plan in plans] for name in MEMORY
    }
    _stack(memory, labels, memory_components)
    memory.axvline(
        MEMORY_FRACTION * hardware.memory / 1e9, color="0.2", linestyle="--", linewidth=1
    )
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
