"""Plot of a fleet over time with the outlier machine."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jrl.faults.collect.fleet import Fleet, Report
from jrl.faults.shift import JOINT
from jrl.report.plots import BLUE, GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RED = "#c81e4a"
MAX_PANELS = 5


def style_axes(axes: "Axes", title: str, unit: str = "") -> None:
    """Sets the title, the unit, the grid and the colours of axes."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_ylabel(unit, fontsize=8, color=MUTED)
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.spines[:].set_visible(False)


def plot_fleet(fleet: Fleet, report: Report, path: Path | str) -> None:
    """Draws each metric over time, the fleet as a band, the named machine as a line, and scores.

    Metrics beyond `MAX_PANELS` are left out, the one of the alarm never.
    """
    from matplotlib.figure import Figure

    alarm = report.alarms[0] if report.alarms else None
    names = list(report.traces) + [n for n in fleet.metrics if n not in report.traces]
    names = [name for name in names if name in fleet.metrics]
    if alarm is not None and alarm.metric in names:
        names.insert(0, names.pop(names.index(alarm.metric)))
    names = names[:MAX_PANELS]
    figure = Figure(figsize=(9, 1.3 * len(names) + 2.2), layout="constrained")
    panels = figure.subplots(len(names) + 1, 1, sharex=True, squeeze=False)[:, 0]
    minutes = np.arange(fleet.num_samples) * fleet.period / 60
    for axes, name in zip(panels, names, strict=False):
        _plot_metric(axes, fleet, minutes, name, None if alarm is None else alarm.machine)
    _plot_scores(panels[-1], fleet, report)
    if alarm is not None:
        begin, end = ((time - fleet.start) / 60 for time in (alarm.start, alarm.end))
        for axes in panels:
            axes.axvspan(begin, end, color=RED, alpha=0.07, linewidth=0)
    since = datetime.fromtimestamp(fleet.start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    panels[-1].set_xlabel(f"minutes since {since}", fontsize=8, color=MUTED)
    title = "No machine stands out" if alarm is None else alarm.describe().split(" (")[0]
    figure.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left")
    figure.savefig(path, dpi=100)


def _plot_metric(
    axes: "Axes", fleet: Fleet, minutes: np.ndarray, name: str, machine: str | None
) -> None:
    values = fleet.values[:, fleet.metrics.index(name)]
    seen = np.isfinite(values).any(0)
    levels = np.full((3, len(minutes)), np.nan)
    if seen.any():
        levels[:, seen] = np.nanpercentile(values[:, seen], [5, 50, 95], axis=0)
    axes.fill_between(minutes, levels[0], levels[2], color=BLUE, alpha=0.25, linewidth=0)
    axes.plot(minutes, levels[1], color=BLUE, linewidth=0.8, label="fleet: median, 5 to 95 %")
    if machine is not None:
        row = values[fleet.machines.index(machine)]
        axes.plot(minutes, row, color=RED, linewidth=0.8, label=machine)
    axes.margins(x=0)
    style_axes(axes, name)
    if axes.get_subplotspec().is_first_row():  # pyright: ignore[reportOptionalMemberAccess]
        axes.legend(fontsize=7, frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=2)


def _plot_scores(axes: "Axes", fleet: Fleet, report: Report) -> None:
    """Plots the greatest score of each window, in the alarm's metric or the first one searched."""
    title = "score of the machine farthest from the others"
    shown = list(report.traces)
    if report.alarms:
        metric = report.alarms[0].metric
        shown = [name for name in shown if metric in name.split(JOINT)] or shown
    for name in shown[:1]:
        trace = report.traces[name]
        seen = np.flatnonzero(np.isfinite(trace.scores))
        minutes = (trace.times[seen] - fleet.start) / 60
        axes.plot(minutes, trace.scores[seen], color=INK, linewidth=0.8)
        axes.axhline(trace.threshold, color=MUTED, linewidth=0.8, linestyle="--")
        title += f", {name}"
    style_axes(axes, title)
