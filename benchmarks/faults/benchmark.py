"""``python -m benchmarks.faults benchmark``: precision, recall and false alarms of each detector.

The default, simple detectors, Minder, its baseline and its ablations examine the same held-out
incidents, simulated in the published mix of faults, and the same clean records. ``--scale``
measures the cost of a call instead.
"""

import json
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from benchmarks.faults.baselines import DETECTORS, AnyDetector
from benchmarks.faults.calibrate import calibrate
from benchmarks.faults.outcomes import (
    DETECTED,
    SILENT,
    WRONG,
    complete_rows,
    false_alarm_rate,
    figures,
    map_in_processes,
    operational_precision,
    outcome,
)
from benchmarks.faults.plots import plot_benchmark, plot_scale
from benchmarks.faults.simulate import PRODUCTION, Settings, simulate
from jrl.checks import check_seed
from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import Fleet
from jrl.faults.minder.detect import Minder
from jrl.faults.standard import StandardDetector

TEST_SEED, CLEAN_SEED = 1_000_000, 2_000_000
"""First held-out seed; seeds of thresholds start at 100,000, those of models at 10,000,000."""
SIZES = ((2, 16), (17, 128), (129, 10**9))
"""Fleet sizes by which the results are split; each has about a third of 4 to 1,500."""
PAPER = {"Minder": (0.904, 0.883, 0.893), "Mahalanobis": (0.788, 0.767, 0.777)}
"""Published precision, recall and F1 on 150 faults of production."""
SCALE_SIZES = (4, 16, 64, 256, 750, 1500)
"""Sizes of the fleets on which the cost of a call is measured."""
SCALE_SEED = 3_000_000


@dataclass(frozen=True)
class BenchmarkOptions:
    """Detectors to measure, and the simulated records to measure them on."""

    incidents: int = 300
    """Records with one fault each."""
    clean: int = 100
    """Records without a fault, of 15 minutes each."""
    machines: int | None = None
    """Machines of each fleet; None samples 4 to 1,500."""
    clean_machines: int | None = None
    """Machines of each fleet without a fault; None is as many as with one."""
    seconds: int = 900
    """Length of each record."""
    metrics: tuple[str, ...] = PRODUCTION
    """Metrics that are recorded."""
    difficulty: float = 1.0
    """Divides how far faults move the metrics."""
    offsets: float = 1.0
    """Scales how many healthy machines differ from the others permanently."""
    heavy_tails: bool = False
    """Heavy tails of pause frames and congestion notifications, as event rates have."""
    drifts: float = 0.0
    """Share of healthy machines that drift away over the whole record."""
    period: int = 1
    """Seconds between two samples."""
    seed: int = 0
    """Added to the seeds of all records."""
    only: tuple[str, ...] = ()
    """Names of the detectors to run; all by default."""
    processes: int | None = None
    """Records that are examined in parallel; None is one per core."""
    scale: bool = False
    """Measure the cost of one call as the fleet grows from 4 to 1,500 machines instead."""
    calibrate: bool = False
    """Choose thresholds on --incidents records of other seeds instead, and print them."""
    out: str = "runs/faults"
    """Folder for the results (JSON) and the plot."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    request = parse_flags(BenchmarkOptions, "python -m benchmarks.faults benchmark", arguments)
    check_seed(request.seed)
    if request.incidents < 1 or request.clean < 0:
        raise ValueError(
            f"incidents={request.incidents} must be at least 1 and clean={request.clean} 0."
        )
    out = Path(request.out)
    if request.scale or request.calibrate:
        out.mkdir(parents=True, exist_ok=True)
    if request.scale:
        return measure_scale(out)
    if request.calibrate:
        counts = request.incidents, request.clean
        settings = _settings(request, True), _settings(request, False)
        names = tuple(select_detectors(request.only))
        return calibrate(names, settings, counts, request.seed, request.processes)
    results = run(request)
    _print(results)
    path = out / "benchmark.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    plot_benchmark(results, out / "benchmark.png")
    print(f"\n{path} and {out / 'benchmark.png'} hold the same.")
    return 0


def select_detectors(only: Sequence[str]) -> dict[str, AnyDetector]:
    """Detectors by name, in the order of the table."""
    unknown = [name for name in only if name not in DETECTORS]
    if unknown:
        raise ValueError(f"only={unknown[0]!r} is unknown: choose among {', '.join(DETECTORS)}.")
    return {name: each for name, each in DETECTORS.items() if not only or name in only}


def run(request: BenchmarkOptions) -> dict[str, Any]:
    """Measures, with a progress bar, and returns the results as they are written.

    Records are appended to ``records.jsonl`` as they complete. An interrupted run is resumed from
    there, also with more records than it was started with.
    """
    detectors = select_detectors(request.only)
    jobs = [(CLEAN_SEED + request.seed + i, False) for i in range(request.clean)]
    jobs += [(TEST_SEED + request.seed + i, True) for i in range(request.incidents)]
    thresholds = {name: detector.threshold for name, detector in detectors.items()}
    # What determines the outcome of a record besides its seed, as JSON has it.
    settings = json.loads(json.dumps(asdict(request) | {"thresholds": thresholds}))
    for name in ("processes", "out", "incidents", "clean"):
        del settings[name]
    compute = partial(_with_progress, request, detectors)
    records = complete_rows(Path(request.out) / "records.jsonl", settings, jobs, compute)
    faulty = [row for row in records if row["fault"] is not None]
    clean = [row for row in records if row["fault"] is None]
    return {
        "settings": {k: v for k, v in asdict(request).items() if k != "out"},
        "thresholds": thresholds,
        "detectors": {name: _summary(name, faulty, clean, request) for name in detectors},
        "records": records,
    }


def _with_progress(
    request: BenchmarkOptions, detectors: dict[str, AnyDetector], jobs: list[tuple[int, bool]]
) -> Iterator[dict[str, Any]]:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # An invalid request is reported before any process starts.
    settings = {faulty: _settings(request, faulty) for faulty in (True, False)}
    with Progress(*columns) as progress:
        task = progress.add_task("records", total=len(jobs))
        run_job = partial(_run_job, detectors, settings)
        for row in map_in_processes(run_job, jobs, request.processes):
            progress.advance(task)
            yield row


def _settings(request: BenchmarkOptions, faulty: bool) -> Settings:
    return Settings(
        machines=request.machines if faulty else request.clean_machines or request.machines,
        seconds=request.seconds,
        metrics=request.metrics,
        difficulty=request.difficulty,
        offsets=request.offsets,
        heavy_tails=request.heavy_tails,
        drifts=request.drifts,
        period=request.period,
        faulty=faulty,
    )


def _run_job(
    detectors: dict[str, AnyDetector], settings: dict[bool, Settings], job: tuple[int, bool]
) -> dict[str, Any]:
    seed, faulty = job
    incident = simulate(settings[faulty], seed)
    record = Minder().prepare_fleet(incident.fleet)
    alarms = {
        name: detector.judge(record).alarms
        if isinstance(detector, Minder)
        else detector(incident.fleet)
        for name, detector in detectors.items()
    }
    return {
        "seed": seed,
        "machines": len(incident.fleet.machines),
        "fault": incident.fault,
        "outcomes": {name: outcome(incident, raised) for name, raised in alarms.items()},
    }


def _summary(
    name: str, faulty: list[dict[str, Any]], clean: list[dict[str, Any]], request: BenchmarkOptions
) -> dict[str, Any]:
    outcomes = [row["outcomes"][name] for row in faulty]
    counts = Counter(outcomes)
    false = sum(row["outcomes"][name] != SILENT for row in clean)
    incidents = Counter(row["fault"] for row in faulty)
    detected = Counter(row["fault"] for row in faulty if row["outcomes"][name] == DETECTED)
    return {
        **asdict(figures(outcomes)),
        "counts": {kind: counts[kind] for kind in (DETECTED, WRONG, SILENT)},
        "recall_by_fault": {kind: [detected[kind], incidents[kind]] for kind in sorted(incidents)},
        "f1_by_machines": _by_machines(name, faulty),
        "false_alarms": false,
        "false_alarms_per_look": false_alarm_rate(false, len(clean)) if clean else None,
        "operational_precision": operational_precision(
            counts[DETECTED] / len(faulty),
            counts[WRONG] / len(faulty),
            false / len(clean),
            passes=86400 / request.seconds,
        )
        if clean
        else None,
        "paper": PAPER.get(name),
    }


def _by_machines(name: str, faulty: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """F1 and its interval, and the number of incidents, by the size of the fleet."""
    results = {}
    for least, most in SIZES:
        incidents = [row for row in faulty if least <= row["machines"] <= most]
        if incidents:
            sizes = [row["machines"] for row in incidents]
            f1 = figures([row["outcomes"][name] for row in incidents]).f1
            results[f"{min(sizes)} to {max(sizes)}"] = {"f1": f1, "incidents": len(incidents)}
    return results


def _print(results: dict[str, Any]) -> None:
    settings = results["settings"]
    print(
        f"{settings['incidents']} incidents and {settings['clean']} clean records of "
        f"{settings['seconds']} s, difficulty {settings['difficulty']}; 95 % intervals\n"
    )
    table = Table("detector", box=box.SIMPLE, pad_edge=False)
    for name in ("precision", "recall", "F1", "paper's F1", "alarms on a clean record"):
        table.add_column(name, justify="right")
    for name, row in results["detectors"].items():
        cells = [_interval(row[figure]) for figure in ("precision", "recall", "f1")]
        paper = f"{row['paper'][2]:.3f}" if row["paper"] else ""
        rate = row["false_alarms_per_look"]
        table.add_row(name, *cells, paper, "not measured" if rate is None else _interval(rate))
    Console(width=140).print(table)
    print("F1 by machines of the fleet:")
    for name, row in results["detectors"].items():
        sizes = row["f1_by_machines"].items()
        cells = (f"{size} {_interval(each['f1'])} of {each['incidents']}" for size, each in sizes)
        print(f"  {name}: {', '.join(cells)}")
    first, row = next(iter(results["detectors"].items()))
    kinds = row["recall_by_fault"]
    print(f"found by {first}: " + ", ".join(f"{k} {a}/{n}" for k, (a, n) in kinds.items()))


def _interval(triple: Sequence[float]) -> str:
    value, low, high = triple
    return f"{value:.3f} ({low:.3f}-{high:.3f})"


def measure_scale(out: Path) -> int:
    """Prints, writes and plots the least cost of three calls of the default detector."""
    rows = []
    for size in SCALE_SIZES:
        row: dict[str, float] = {"machines": size}
        for kind, faulty in (("clean", False), ("fault", True)):
            fleet = simulate(Settings(machines=size, faulty=faulty), SCALE_SEED + size).fleet
            row[f"{kind}_seconds"], row[f"{kind}_cpu_seconds"] = _cost(fleet)
        row["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(row)
    (out / "scale.json").write_text(json.dumps(rows, indent=2) + "\n")
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("machines", "clean, s", "CPU s", "fault, s", "CPU s", "peak memory, MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        machines, *costs, memory = row.values()
        table.add_row(str(machines), *(f"{cost:.3f}" for cost in costs), f"{memory:.0f}")
    Console(width=110).print(table)
    plot_scale(rows, out / "scale.png")
    return 0


def _cost(fleet: Fleet) -> tuple[float, float]:
    detector = StandardDetector()
    detector(fleet)
    wall, cpu = [], []
    for _ in range(3):
        begin = time.perf_counter(), time.process_time()
        detector(fleet)
        wall.append(time.perf_counter() - begin[0])
        cpu.append(time.process_time() - begin[1])
    return min(wall), min(cpu)
