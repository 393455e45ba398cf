"""``python -m benchmarks.faults synchronous``: the default detector on synchronous training.

Each record is looked at as `watch` does, every minute at the last half hour, and as `replay` does,
once over the whole record. An alarm in a healthy record, or before the fault, or of another machine
is false.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.outcomes import (
    DETECTED,
    SILENT,
    WRONG,
    figures,
    map_in_processes,
    most_events,
    outcome,
)
from benchmarks.faults.sliding import looks
from benchmarks.faults.synchronous import SLOWDOWNS, Synchronous, simulate
from jrl.checks import check_seed
from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import Alarm
from jrl.faults.standard import StandardDetector
from jrl.faults.watcher import RECORD_SECONDS, AlarmTracker

MONTH_HOURS = 730.0
FLEET = 1024
"""False alarms are given for a month of so many machines."""
FIRST_LOOK = 600
"""Seconds before which a record is too short for a verdict."""


@dataclass(frozen=True)
class SynchronousOptions:
    """Simulated records of synchronous training to look at."""

    faults: int = 60
    """Records of each level of slowdown."""
    clean: int = 60
    """Records without a fault."""
    seed: int = 0
    """Added to the seeds of all records."""
    interval: float = 60.0
    """Seconds between two looks."""
    processes: int | None = None
    """Records that are processed in parallel; None is one per core."""
    out: str | None = None
    """File for the outcome of each record (JSON)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    request = parse_flags(SynchronousOptions, "python -m benchmarks.faults synchronous", arguments)
    check_seed(request.seed)
    if not (request.interval > 0 and request.faults >= 0 and request.clean >= 0):
        raise ValueError(
            f"interval={request.interval} must be above 0, and faults={request.faults} and "
            f"clean={request.clean} at least 0."
        )
    jobs = [
        (1000 * index + request.seed + i, level)
        for index, level in enumerate((*SLOWDOWNS, None))
        for i in range(request.clean if level is None else request.faults)
    ]
    work = partial(examine, request.interval)
    rows = list(map_in_processes(work, jobs, request.processes))
    print("\n".join(summary(rows)))
    if request.out is not None:
        Path(request.out).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def examine(interval: float, job: tuple[int, str | None]) -> dict[str, Any]:
    """Both ways of looking at the record of a seed."""
    seed, level = job
    settings = Synchronous(level)
    incident = simulate(settings, seed)
    tracker, alarms, when = AlarmTracker(StandardDetector()), (), None
    false: list[Alarm] = []
    passes = compared = 0
    for record in looks(incident.fleet, RECORD_SECONDS, interval):
        if record.end - incident.fleet.start < FIRST_LOOK:
            continue
        report, raised = tracker.update(record)
        passes, compared = passes + 1, compared + report.comparable
        if raised and level is not None:
            alarms, when = raised, record.end - incident.start
            break
        false += raised
    once = StandardDetector(past=0.0)(incident.fleet)
    fleet = incident.fleet
    return {
        "seed": seed,
        "level": level,
        "fault": incident.fault,
        "machines": len(fleet.machines),
        "period": fleet.period,
        "hours": fleet.num_samples * fleet.period / 3600,
        "watch": outcome(incident, alarms),
        "seconds": when,
        "passes": passes,
        "compared": compared,
        "false": [alarm.describe() for alarm in (false if level is None else alarms)],
        "replay": outcome(incident, once),
        "replayed": [alarm.describe() for alarm in once[:1]],
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: recall, wrong names and F1 by level, and false alarms of healthy fleets."""
    lines = [f"{'level':<8} {'looks':<7} faults  found  wrong  recall  F1"]
    for level in SLOWDOWNS:
        of_level = [row for row in rows if row["level"] == level]
        for way in ("watch", "replay") if of_level else ():
            outcomes = [row[way] for row in of_level]
            counts, scores = Counter(outcomes), figures(outcomes, resamples=1)
            lines.append(
                f"{level:<8} {way:<7} {len(of_level):6}  {counts[DETECTED]:5}  {counts[WRONG]:5}  "
                f"{scores.recall[0]:6.3f}  {scores.f1[0]:.3f}"
            )
    clean = [row for row in rows if row["level"] is None]
    if clean:
        hours = sum(row["hours"] * row["machines"] for row in clean)
        alarms = sum(len(row["false"]) for row in clean)
        once = sum(row["replay"] != SILENT for row in clean)
        months = hours / FLEET / MONTH_HOURS
        lines.append(
            f"healthy: {len(clean)} records, {hours:.0f} machine hours; watch {alarms} false "
            f"alarms ({alarms / months:.2g} a month of {FLEET} machines, at most "
            f"{most_events(alarms) / months:.2g}), replay {once}"
        )
    return lines
