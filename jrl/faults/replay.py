"""``python -m jrl.faults replay FILE``: runs the detector on a recorded fleet.

It prints a table of the metrics that were searched and the alarm, if any, and plots the outlier
machine over time. Give a fleet (``.npz``), the folder of a run that was sampled, or an answer of
Prometheus (``.json``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import INCOMPARABLE, Alarm, Aligned, Fleet, Report, align
from jrl.faults.collect.record import read_folder
from jrl.faults.remote.exporters import assemble, describe_ignored, sort_series
from jrl.faults.remote.prometheus import read_series
from jrl.faults.shift import JOINT
from jrl.faults.standard import SILENCE, SilenceDetector, StandardDetector
from jrl.faults.watcher import DetectorOptions, examine, trim_to_common_start
from jrl.program import program
from jrl.report.plots import BLUE, GRID, INK, MUTED

RED = "#c81e4a"
MAX_PANELS = 5


@dataclass(frozen=True)
class ReplayOptions(DetectorOptions):
    """Record to examine, and settings of the detector."""

    record: tyro.conf.Positional[str]
    """A fleet (.npz), the folder of a run with fault records, or a response of Prometheus
    (.json)."""
    last: float = 900.0
    """Seconds to examine, counted from the end."""
    plot: str | None = None
    """Plot to write; by default next to the record, with suffix .png."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    request = parse_flags(ReplayOptions, program("faults replay"), arguments)
    record = Path(request.record)
    fleet, notes = read_fleet(record, request.machine_label, request.metrics)
    fleet = fleet.last(request.last)
    if request.metrics:
        fleet = fleet.select(request.metrics)
    detector = request.make_detector()
    if isinstance(detector, StandardDetector):
        # An earlier pass had no more data before an onset than this record has.
        detector = replace(detector, past=0.0)
    report = examine(fleet, detector)
    if request.detector != "standard":  # which detects silence itself
        report = replace(report, alarms=[*report.alarms, *SilenceDetector()(fleet)])
    if record.is_dir():
        report = replace(report, alarms=[*report.alarms, *find_stopped(record)])
    _print(fleet, report, notes)
    path = Path(request.plot or record.with_suffix(".png"))
    plot_fleet(fleet, report, path)
    print(f"picture: {path}")
    return 0 if report.comparable else INCOMPARABLE


def read_fleet(
    path: Path, machine_label: str | None = None, metrics: Sequence[str] = ()
) -> tuple[Fleet, list[str]]:
    """Reads the fleet of a file or a folder, and lists what could not be read.

    The fleet of a folder has the processes that ran until the end, from when all have samples.

    Args:
      machine_label: names the machine in an answer of Prometheus.
      metrics: names of exporters that are read although they are unknown.

    Raises:
      ValueError: if it holds none.
      OSError: if it cannot be read.
    """
    if path.is_dir():
        aligned, _, notes = _read_run(path)
        if not aligned.processes:
            raise ValueError(
                f"{path} holds no records of the sampler: give the folder of a run that was "
                "started with --faults."
            )
        notes += [
            f"process {each.machine!r} is not compared: {each.state}."
            for each in aligned.processes
            if each.state != "running"
        ]
        return trim_to_common_start(aligned.fleet), notes
    if path.suffix == ".json":
        series = read_series([path.read_bytes()], machine=machine_label, requested=metrics)
        parts = sort_series(series, label=machine_label, requested=metrics)
        return assemble(parts), [*parts.notes, *describe_ignored(series, metrics)]
    return Fleet.load(path), []


def find_stopped(path: Path) -> list[Alarm]:
    """Alarms for processes of a run whose samples stopped uncleanly."""
    aligned, ended, _ = _read_run(path)
    end = aligned.fleet.end
    return [
        Alarm(each.machine, SILENCE, end - each.age, end, {"seconds": float(each.age)})
        for each in aligned.processes
        if each.state == "silent" and each.machine not in ended
    ]


def _read_run(path: Path) -> tuple[Aligned, set[str], list[str]]:
    """Aligned processes of a run, names of those that ended cleanly, and what cannot be read.

    Of a finished run all processes have ended, and are compared nevertheless.
    """
    inside = path / "faults"
    records, notes = read_folder(inside if inside.is_dir() else path)
    ended = {record.machine for record in records if record.ended}
    return align([replace(record, ended=False) for record in records]), ended, notes


def _print(fleet: Fleet, report: Report, notes: list[str]) -> None:
    print(
        f"{len(fleet.machines)} machines, {len(fleet.metrics)} metrics, "
        f"{fleet.num_samples * fleet.period:.0f} s\n"
    )
    for note in (*notes, *report.notes):
        print(f"note: {note}")
    if report.traces:
        Console(width=100).print(_table(report))
    for alarm in report.alarms:
        print(f"ALARM: {alarm.describe()}")
    if not report.alarms:
        print("no alarm" if report.comparable else "nothing could be compared: no verdict")


def _table(report: Report) -> Table:
    table = Table("metric searched", "stands out most", box=box.SIMPLE, pad_edge=False)
    for name in ("of its moments", "greatest score", "moments looked at"):
        table.add_column(name, justify="right")
    for metric, trace in report.traces.items():
        seen = np.isfinite(trace.scores)
        hits = np.bincount(trace.leader[trace.leader >= 0], minlength=1)
        who = report.machines[hits.argmax()] if hits.any() else "none"
        most = float(trace.scores[seen].max()) if seen.any() else float("nan")
        share = hits.max() / max(1, seen.sum())
        table.add_row(metric, who, f"{share:.0%}", f"{most:.2f}", f"{seen.sum()}/{len(seen)}")
    return table


if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
