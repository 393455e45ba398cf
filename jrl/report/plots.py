"""Plots of a run, from its ``metrics.jsonl``.

`plot_run` writes one overview and one image for each panel. Only panels whose metrics were logged
are plotted. matplotlib is imported inside the functions, so that a command line need not wait for
it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from jrl.report.metrics import is_rounding
from jrl.runs import records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, ORANGE, GREEN, PURPLE = "#2563eb", "#ea7317", "#12936f", "#8b3fc7"
DPI = 200


@dataclass(frozen=True)
class Line:
    """One curve of a panel: its metric, its name in the legend, and its colour."""

    metric: str
    label: str
    colour: str = BLUE


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
      file: name of its own image, without suffix.
      title: its title.
      unit: label of the y axis.
      lines: its curves; metrics that were not logged are left out.
      measured: whether the points are sparse measurements, which get markers and no smoothing.
      reference: draws the first value of this metric, from before RL, as a horizontal line.
      bounds: the natural range of the quantity on the y axis, if it has one.
      lowest: lower limit of the y range, for a quantity that may start arbitrarily low.
      percent: whether the y axis is in percent.
    """

    file: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    measured: bool = False
    reference: str | None = None
    bounds: tuple[float | None, float | None] = (None, None)
    lowest: float = -math.inf
    percent: bool = False


PANELS = (
    Panel("reward", "Reward", "mean score", (Line("critic/score/mean", "score"),)),
    Panel(
        "accuracy",
        "Held-out accuracy",
        "full marks",
        (
            Line("val/accuracy/sampled", "sampled", BLUE),
            Line("val/accuracy/greedy", "greedy", ORANGE),
        ),
        measured=True,
        reference="val/accuracy/sampled",
        bounds=(0.0, 1.0),
        percent=True,
    ),
    Panel(
        "nll",
        "Negative log-likelihood",
        "nats per token",
        (Line("actor/nll", "training", BLUE), Line("val/nll", "held-out", ORANGE)),
    ),
    Panel(
        "token_accuracy",
        "Held-out tokens right",
        "share of tokens",
        (Line("val/token_accuracy", "most probable token", GREEN),),
        measured=True,
        bounds=(0.0, 1.0),
        percent=True,
    ),
    Panel(
        "response_length",
        "Response length",
        "tokens",
        (Line("response_length/mean", "mean", GREEN),),
    ),
    Panel("entropy", "Entropy", "nats per token", (Line("actor/entropy", "entropy", PURPLE),)),
    Panel(
        "kl",
        "KL from the sampling policy",
        "nats per token",
        (Line("actor/ppo_kl", "sampling policy"),),
    ),
    Panel(
        "reference_kl",
        "KL from the reference",
        "nats per token",
        (Line("actor/kl_loss", "reference", ORANGE),),
    ),
    Panel(
        "teacher_gap",
        "Gap to the teacher",
        "nats per token",
        (Line("teacher/gap", "policy minus teacher", ORANGE),),
    ),
    Panel(
        "clip_fraction",
        "Clip fraction",
        "share of tokens",
        (
            Line("actor/pg_clipfrac", "clipped", BLUE),
            Line("actor/pg_clipfrac_lower", "dual clip", ORANGE),
        ),
        bounds=(0.0, None),
        percent=True,
    ),
    Panel(
        "explained_variance",
        "Explained variance",
        "share of the returns' variance",
        (Line("critic/vf_explained_var", "explained variance", GREEN),),
        bounds=(None, 1.0),
        lowest=-1.0,
    ),
    Panel(
        "router_load",
        "Router load",
        "load (1 is even)",
        (
            Line("moe/max_load", "busiest expert", ORANGE),
            Line("moe/min_load", "idlest expert", BLUE),
        ),
        bounds=(0.0, None),
    ),
)

Series = tuple[list[float | int], list[float | int]]


def plot_run(
    metrics_path: Path | str, directory: Path | str, title: str | None = None
) -> list[Path]:
    """Draw ``overview.png`` and one PNG for each panel with data.

    Returns:
      The paths written, the overview first; none if no panel has a metric.
    """
    history = records.read_metrics(metrics_path)
    logged = [
        panel for panel in PANELS if any(series(history, line.metric) for line in panel.lines)
    ]
    panels = [panel for panel in logged if not _is_rounding(panel, history)]
    if not panels:
        return []

    figure, grid = create_grid(len(panels), title)
    if rounding := [panel.title for panel in logged if panel not in panels]:
        note = f"Differences of rounding alone: {', '.join(rounding)}"
        figure.supxlabel(note, fontsize=11, color=MUTED)
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, history)
    paths = [save(figure, Path(directory) / "overview.png")]
    for panel in panels:
        figure, (axes,) = create_grid(1, None)
        _draw_panel(axes, panel, history)
        paths.append(save(figure, Path(directory) / f"{panel.file}.png"))
    return paths


def _is_rounding(panel: Panel, history: Sequence[Mapping[str, float | int]]) -> bool:
    """True if all curves of a panel are differences of rounding, which are written instead."""
    curves = ((line.metric, series(history, line.metric)) for line in panel.lines)
    return all(points is None or is_rounding(name, points[1]) for name, points in curves)


def series(history: Sequence[Mapping[str, float | int]], metric: str) -> Series | None:
    """Return the steps and the values of one metric, or None if it was never finite."""
    points = [
        (record["step"], record[metric])
        for record in history
        if metric in record and math.isfinite(record[metric])
    ]
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    return list(steps), list(values)


def smooth(values: Sequence[float | int], width: int) -> list[float]:
    """Return the centred Gaussian average of `values`, its standard deviation `width` / 2 points.

    At the ends the window is cut, so that the average neither lags nor starts at zero.
    """
    reach = 2 * width - 1
    kernel = np.exp(-2.0 * (np.arange(-reach, reach + 1) / width) ** 2)
    inside = slice(reach, reach + len(values))
    total, weight = (np.convolve(x, kernel)[inside] for x in (values, np.ones(len(values))))
    return list(total / weight)


def create_grid(num_panels: int, title: str | None) -> tuple["Figure", list["Axes"]]:
    """A figure of 1600 x 900 pixels at 2x, or smaller for few panels, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 9: 3}.get(num_panels, 4)
    rows = math.ceil(num_panels / columns)
    width, height = {(1, 1): (8.0, 4.5)}.get((rows, columns), (16.0, 3.9 * rows + 1.2))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    if title is not None:
        figure.suptitle(title, fontsize=19, fontweight="bold", color=INK, x=0.012, ha="left")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for unused in axes[num_panels:]:
        unused.set_visible(False)
    return figure, axes[:num_panels]


def _draw_panel(axes: "Axes", panel: Panel, history: Sequence[Mapping[str, float | int]]) -> None:
    axes.set_title(panel.title, fontsize=14, fontweight="bold", color=INK, loc="left", pad=10)
    axes.set_xlabel("step", fontsize=12, color=MUTED)
    axes.set_ylabel(panel.unit, fontsize=12, color=MUTED)
    style_axes(axes)
    curves = [(line, points) for line in panel.lines if (points := series(history, line.metric))]
    for line, points in curves:
        _draw_line(axes, points, line.label, line.colour, panel.measured)
    start = None if panel.reference is None else series(history, panel.reference)
    if start is not None:
        level = start[1][0]
        axes.axhline(level, color=MUTED, linewidth=1.4, linestyle=(0, (4, 3)), label="warm start")
    _frame(axes, panel)
    if len(curves) > 1 or start is not None:
        axes.legend(frameon=False, labelcolor=INK)


def _draw_line(axes: "Axes", points: Series, label: str, colour: str, measured: bool) -> None:
    steps, values = points
    if measured or len(values) < 8:
        axes.plot(steps, values, color=colour, label=label, linewidth=2.4, marker="o", markersize=5)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1.1)
    smoothed = smooth(values, width=max(2, len(values) // 25))
    axes.plot(steps, smoothed, color=colour, label=label, linewidth=2.6)


def style_axes(axes: "Axes", lines: Literal["both", "y"] = "both") -> None:
    """Removes frames and ticks, and draws a grid of these lines behind the data."""
    axes.grid(color=GRID, linewidth=1.0, axis=lines)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=11, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def _frame(axes: "Axes", panel: Panel) -> None:
    """Set the ranges and the ticks, after the curves are drawn."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    low, high = panel.bounds
    bottom, top = axes.get_ylim()
    margin = 0.02 * (top - max(bottom, panel.lowest))
    # Natural bounds get a margin, so that a curve on the bound is visible.
    axes.set_ylim(
        max(bottom, panel.lowest) if low is None else low - margin,
        top if high is None else high + margin,
    )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    if panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g} %"))


def save(figure: "Figure", path: Path | str) -> Path:
    """Write the image atomically: after a kill, the old one is intact."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, dpi=DPI, format="png")
    temporary.replace(path)
    return path
