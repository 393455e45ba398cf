"""``python -m benchmarks.faults sliding``: false alarms per day, and recall, of `watch`.

`watch` runs a detection pass on the last half hour, again and again. So each pass has another
beginning, and most begin or end in some checkpoint of the day. The clean hours are those of
`benchmarks.faults.simulate.operation`; each newly alarmed machine counts as one false alarm. Faults
are incidents of `benchmarks.faults.simulate.incident` that begin at least ten minutes into the
record.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks.faults.outcomes import (
    DETECTED,
    SILENT,
    WRONG,
    complete_rows,
    map_in_processes,
    most_events,
    outcome,
)
from benchmarks.faults.simulate import Settings, simulate
from benchmarks.faults.simulate.operation import Operation, simulate_operation
from jrl.checks import check_seed
from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import Fleet
from jrl.faults.standard import StandardDetector
from jrl.faults.watcher import RECORD_SECONDS, AlarmTracker

CLEAN_SEED, FAULT_SEED = 4_000_000, 5_000_000
"""First seed, of a range that nothing else uses."""
INCIDENT_SECONDS, EARLIEST = 2400, 600
"""Length of a record with a fault, and the earliest second of the fault."""


@dataclass(frozen=True)
class SlidingOptions:
    """Clean hours and incidents to look at."""

    hours: float = 24.0
    """Hours of clean fleets."""
    stretch: float = 6.0
    """Hours of each fleet."""
    machines: int = 1024
    """Machines of each clean fleet; those with a fault have 4 to 1,500."""
    period: int = 15
    """Seconds between two samples, at least 1."""
    interval: float = 60.0
    """Seconds between two looks."""
    seconds: float = RECORD_SECONDS
    """Length of the record of a look."""
    drifts: float = Operation.drifts
    """Share of healthy machines that drift in one metric over hours."""
    incidents: int = 0
    """Records with one fault each, sampled every second."""
    difficulty: float = 1.0
    """Divides how far faults move the metrics."""
    seed: int = 0
    """Added to the seeds of all records."""
    processes: int | None = None
    """Records that are processed in parallel; None is one per core."""
    out: str = "runs/faults"
    """Folder for the results (JSON)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    request = parse_flags(SlidingOptions, "python -m benchmarks.faults sliding", arguments)
    check_seed(request.seed)
    if not (request.hours >= 0 and request.stretch > 0 and request.incidents >= 0):
        raise ValueError(
            f"hours={request.hours} and incidents={request.incidents} must be at least 0, and "
            f"stretch={request.stretch} above 0."
        )
    if not (request.interval > 0 and request.period <= request.seconds):
        raise ValueError(
            f"interval={request.interval} must be above 0, and seconds={request.seconds} at least "
            f"period={request.period}."
        )
    results = run(request)
    path = Path(request.out) / "sliding.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    _print(results)
    print(f"{path} holds the same.")
    return 0


def looks(fleet: Fleet, seconds: float | int, interval: float | int) -> Iterator[Fleet]:
    """The records of the passes of `watch`: the last `seconds` of a fleet, every `interval`."""
    width, hop = (max(1, round(each / fleet.period)) for each in (seconds, interval))
    for last in range(hop, fleet.num_samples + 1, hop):
        first = max(0, last - width)
        start = fleet.start + first * fleet.period
        yield replace(fleet, start=start, values=fleet.values[:, :, first:last])


def run(request: SlidingOptions) -> dict[str, Any]:
    """Runs detection on all records, and returns the results as they are written.

    Records are appended to ``sliding.jsonl`` as they complete. An interrupted run is resumed from
    there, also with more records than it was started with.
    """
    count = max(1, round(request.hours / request.stretch)) if request.hours > 0 else 0
    jobs = [(CLEAN_SEED + request.seed + i, "clean") for i in range(count)]
    jobs += [(FAULT_SEED + request.seed + i, "fault") for i in range(request.incidents)]
    settings = asdict(request) | {"threshold": float(StandardDetector.threshold)}
    for name in ("hours", "incidents", "processes", "out"):
        del settings[name]

    def compute(due: list[tuple[int, str]]) -> Iterable[dict[str, Any]]:
        rows = map_in_processes(partial(_look, request), due, request.processes)
        return track(rows, "records", total=len(due))

    rows = complete_rows(Path(request.out) / "sliding.jsonl", settings, jobs, compute)
    clean = [row for row in rows if row["kind"] == "clean"]
    faulty = [row for row in rows if row["kind"] == "fault"]
    hours = count * request.stretch
    alarms = sum(len(row["alarms"]) for row in clean)
    outcomes = Counter(row["outcome"] for row in faulty)
    return {
        "settings": {k: v for k, v in asdict(request).items() if k not in ("out", "processes")},
        "hours": hours,
        "looks": sum(row["looks"] for row in clean),
        "looks_not_compared": sum(row["not_compared"] for row in clean),
        "false_alarms": alarms,
        "false_alarms_per_day": 24 * alarms / hours if hours else None,
        "false_alarms_per_day_at_most": 24 * most_events(alarms) / hours if hours else None,
        "outcomes": {name: outcomes[name] for name in (DETECTED, WRONG, SILENT)},
        "records": rows,
    }


def _look(request: SlidingOptions, job: tuple[int, str]) -> dict[str, Any]:
    """Detection on one record."""
    seed, kind = job
    if kind == "fault":
        return _look_at_fault(request, seed)
    settings = Operation(
        machines=request.machines,
        hours=request.stretch,
        period=float(request.period),
        drifts=request.drifts,
    )
    fleet, phases = simulate_operation(settings, seed)
    tracker, counts, alarms = AlarmTracker(StandardDetector()), Counter(), []
    for record in looks(fleet, request.seconds, request.interval):
        report, raised = tracker.update(record)
        counts["looks"] += 1
        counts["not_compared"] += not report.comparable
        alarms += [(alarm.describe(), round(record.end - fleet.start)) for alarm in raised]
    return {
        "kind": kind,
        "seed": seed,
        "looks": counts["looks"],
        "not_compared": counts["not_compared"],
        "phases": len(phases),
        "alarms": alarms,
    }


def _look_at_fault(request: SlidingOptions, seed: int) -> dict[str, Any]:
    """Detection on one incident; the first alarm decides its outcome."""
    settings = Settings(seconds=INCIDENT_SECONDS, earliest=EARLIEST, difficulty=request.difficulty)
    incident = simulate(settings, seed)
    tracker, first, when = AlarmTracker(StandardDetector()), (), None
    for record in looks(incident.fleet, request.seconds, request.interval):
        _, first = tracker.update(record)
        if first:
            when = record.end - incident.start
            break
    return {
        "kind": "fault",
        "seed": seed,
        "machines": len(incident.fleet.machines),
        "fault": incident.fault,
        "outcome": outcome(incident, first),
        "seconds": when,
    }


def _print(results: dict[str, Any]) -> None:
    settings = results["settings"]
    if results["hours"]:
        print(
            f"{results['false_alarms']} false alarms in {results['hours']:g} hours of "
            f"{settings['machines']} machines ({results['looks']} looks, "
            f"{results['looks_not_compared']} not compared): "
            f"{results['false_alarms_per_day']:.3g} a day, at most "
            f"{results['false_alarms_per_day_at_most']:.3g} (95 %)"
        )
        for row in results["records"]:
            for line, second in row.get("alarms", []):
                print(f"  seed {row['seed']}, after {second / 3600:.2f} h: {line}")
    if settings["incidents"]:
        counts = results["outcomes"]
        seconds = sorted(
            row["seconds"] for row in results["records"] if row.get("outcome") == DETECTED
        )
        after = f", after {seconds[len(seconds) // 2]:.0f} s in the median" if seconds else ""
        print(
            f"{counts[DETECTED]} of {settings['incidents']} faults found{after}; "
            f"{counts[WRONG]} wrong, {counts[SILENT]} silent"
        )
