"""Timeline picture of a server's first layers: the micro-batch of each device group over time."""

from pathlib import Path

from sharding.planner.serving.pingpong import STATIONS, simulate
from sharding.planner.serving.search import ServingPlan

NUM_LAYERS = 3


def draw(plan: ServingPlan, path: Path, title: str = "") -> None:
    """Draws a row for each station and a bar for each visit, coloured by micro-batch.

    Args:
      path: where the picture goes; the suffix decides its format.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    attention, experts, sending = plan.layer
    lasts = (attention, sending, experts, sending)
    starts = simulate(attention, experts, sending, plan.shape.micro_batches, NUM_LAYERS)
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots()
    for (layer, micro_batch, station), start in _visits(starts):
        colour = colormaps["tab10"](micro_batch)
        width = lasts[station] * 1e3
        axes.barh(station, width, left=start * 1e3, height=0.7, color=colour, edgecolor="white")
        middle = start * 1e3 + width / 2
        axes.text(middle, station, f"{layer}.{micro_batch}", ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(STATIONS)), STATIONS)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds; layer and micro-batch in the bars")
    if title:
        axes.set_title(title)
    figure.savefig(path, dpi=120)


def _visits(starts):
    layers, num_micro_batches, stations = starts.shape
    for layer in range(layers):
        for micro_batch in range(num_micro_batches):
            for station in range(stations):
                yield (layer, micro_batch, station), float(starts[layer, micro_batch, station])
