"""``python -m jrl.faults replay FILE``: runs the detector on a recorded fleet.

It prints a table of the metrics that were searched and the alarm, if any, and plots the outlier
machine over time. Give a fleet (``.npz``), the folder of a run that was sampled, or an answer of
Prometheus (``.json``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jrl.command_line import parse_flags
from jrl.faults.collect.align import Aligned, align
from jrl.faults.collect.fleet import INCOMPARABLE, Alarm, Fleet, Report
from jrl.faults.collect.record import read_folder
from jrl.faults.plots import plot_fleet
from jrl.faults.remote.exporters import assemble, describe_ignored, sort_series
from jrl.faults.remote.prometheus import read_series
from jrl.faults.standard import SILENCE, SilenceDetector, StandardDetector
from jrl.faults.watcher import DetectorOptions, examine, trim_to_common_start


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
    request = parse_flags(ReplayOptions, "python -m jrl.faults replay", arguments)
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
      ValueError: where it holds none.
      OSError: where it cannot be read.
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
    """Alarms for processes of a run whose samples stopped without a clean end."""
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
