"""``python -m jrl.faults replay FILE``: what the detector says about a recorded fleet.

A table of the metrics that were searched, the alarm or that there is none, and a picture of the
machine that stands out over time. Give a fleet (``.npz``), the folder of a run that was
sampled, or an answer of Prometheus (``.json``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jrl.faults.collect.align import align, read_folder
from jrl.faults.collect.prometheus import read_answers
from jrl.faults.fleet import Fleet
from jrl.faults.live.watcher import all_present
from jrl.faults.minder.detect import Minder, Report


@dataclass(frozen=True)
class Request:
    """What to look at, and how."""

    record: tyro.conf.Positional[str]
    """A fleet (.npz), the folder of a run that was sampled, or an answer of Prometheus (.json)."""
    last: float = 900.0
    """Seconds that are looked at, counted from the end."""
    threshold: float = Minder.threshold
    """Score from which a machine is a candidate."""
    continuity: float = float(Minder.continuity)
    """Seconds for which the same machine must be the candidate."""
    metrics: tuple[str, ...] = ()
    """The metrics to search, in this order; all that were recorded by default."""
    machine_label: str = "machine"
    """Label that names the machine in an answer of Prometheus, often "instance"."""
    plot: str | None = None
    """The picture to draw; by default beside the record, with the ending .png."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    request = tyro.cli(Request, prog="python -m jrl.faults replay", args=arguments)
    fleet, notes = read_fleet(Path(request.record), request.machine_label)
    fleet = fleet.last(request.last)
    if request.metrics:
        fleet = fleet.select(request.metrics)
    minder = Minder(
        threshold=request.threshold,
        continuity=request.continuity,
        priority=request.metrics or Minder.priority,
    )
    report = minder.examine(fleet)
    _print(fleet, report, notes)
    path = Path(request.plot or Path(request.record).with_suffix(".png"))
    from jrl.faults.plots import plot_fleet

    plot_fleet(fleet, report, path)
    print(f"picture: {path}")
    return 0


def read_fleet(path: Path, machine_label: str = "machine") -> tuple[Fleet, list[str]]:
    """The fleet that a file or a folder holds, and what could not be read of it.

    Raises:
      ValueError: where it holds none.
      OSError: where it cannot be read.
    """
    if path.is_dir():
        return _read_records(path)
    if path.suffix == ".json":
        return read_answers([path.read_bytes()], machine=machine_label), []
    return Fleet.load(path), []


def _read_records(path: Path) -> tuple[Fleet, list[str]]:
    """The processes of a run that were there at its end, from when all of them have samples."""
    inside = path / "faults"
    records, notes = read_folder(inside if inside.is_dir() else path)
    if not records:
        raise ValueError(f"{path} holds no records of the sampler: give the folder of a run.")
    # Of a run that is over all processes have ended, and are compared all the same.
    aligned = align([replace(record, ended=False) for record in records])
    notes += [
        f"process {each.machine!r} is not compared: {each.state}."
        for each in aligned.processes
        if each.state != "running"
    ]
    return all_present(aligned.fleet), notes


def _print(fleet: Fleet, report: Report, notes: list[str]) -> None:
    print(
        f"{len(fleet.machines)} machines, {len(fleet.metrics)} metrics, "
        f"{fleet.num_samples * fleet.period:.0f} s\n"
    )
    for note in (*notes, *report.notes):
        print(f"note: {note}")
    if report.views:
        Console(width=100).print(_table(report))
    for alarm in report.alarms:
        print(f"ALARM: {alarm.describe()}")
    if not report.alarms:
        print("no alarm")


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("metric searched")
    table.add_column("named most")
    for name in ("of its windows", "median score", "windows looked at"):
        table.add_column(name, justify="right")
    for view, named, scores in zip(report.views, report.named, report.scores, strict=True):
        seen = np.isfinite(scores)
        hits = np.bincount(named[named >= 0], minlength=1)
        who = report.prepared.machines[hits.argmax()] if hits.any() else "nobody"
        median = float(np.median(scores[seen])) if seen.any() else float("nan")
        share = hits.max() / max(1, seen.sum())
        table.add_row(view, who, f"{share:.0%}", f"{median:.2f}", f"{seen.sum()}/{len(seen)}")
    return table
