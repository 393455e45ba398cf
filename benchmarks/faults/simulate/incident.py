"""Simulated incident: a recorded fleet with its ground truth (faulty machine, time, fault).

``python -m benchmarks.faults simulate FILE`` writes one as a file that ``replay`` reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tyro

from benchmarks.faults.simulate.healthy import Job, as_events, make_job, simulate_healthy
from benchmarks.faults.simulate.settings import FAULTS, METRICS, PRODUCTION, Fault, Settings
from jrl.checks import check_seed
from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import Fleet

EPOCH = 1_750_000_000.0
"""Unix time at which simulated records start."""
MIN_MACHINES, MAX_MACHINES = 4, 1500


@dataclass(frozen=True)
class Incident:
    """A fleet with its ground truth.

    Attributes:
      fleet: the recorded metrics.
      job: the job that it ran.
      machine: name of the machine that failed, or None in a clean record.
      fault: its fault, or None.
      start: Unix time of the onset, in seconds; NaN in a clean record.
      end: Unix time of the end of the fault, or of the record.
      shown: the recorded metrics that the fault changes.
    """

    fleet: Fleet
    job: Job
    machine: str | None = None
    fault: str | None = None
    start: float = math.nan
    end: float = math.nan
    shown: tuple[str, ...] = ()


def simulate(settings: Settings, seed: int) -> Incident:
    """Simulates the fleet of a seed: the same settings and seed give the same values.

    A fault begins in the record and lasts 4 to 20 minutes, 8 in the median and less than 5 in a
    tenth of the cases ("mostly more than 5 minutes"), or until the record ends. The machines of
    its pipeline and the rest of the fleet follow it in part (`Fault.pipeline`, `Fault.fleet`).
    """
    random = np.random.default_rng(seed)
    sampled = np.exp(random.uniform(np.log(MIN_MACHINES), np.log(MAX_MACHINES + 1)))
    num_machines = int(sampled) if settings.machines is None else settings.machines
    job = make_job(num_machines, settings.seconds, settings.clock_skew, random)
    values = simulate_healthy(job, settings, random)
    names = tuple(f"machine-{i:04d}" for i in range(num_machines))
    truth = _fail(values, job, names, settings, random) if settings.faulty else {}
    capacity = np.array([METRICS[name].capacity for name in settings.metrics], np.float32)
    values = np.clip(values, 0, 1.2, out=values)
    if settings.heavy_tails:
        for column, name in enumerate(settings.metrics):
            if METRICS[name].events:
                values[:, column] = as_events(values[:, column], random)
    values *= capacity[:, None]
    _drop_samples(values, settings, random)
    values = _downsample(values, settings.period)
    fleet = Fleet(names, settings.metrics, EPOCH, float(settings.period), values)
    return Incident(fleet, job, **truth)


def _fail(
    values: np.ndarray,
    job: Job,
    names: tuple[str, ...],
    settings: Settings,
    random: np.random.Generator,
) -> dict:
    """Lets one machine fail, in place, and returns its ground truth."""
    shares = np.array([fault.share for fault in FAULTS])
    fault = FAULTS[random.choice(len(FAULTS), p=shares / shares.sum())]
    if settings.fault is not None:
        fault = next(each for each in FAULTS if each.name == settings.fault)
    seconds = values.shape[2]
    machine = int(random.integers(len(names)))
    duration = int(np.clip(random.lognormal(np.log(480), 0.37), 240, 1200))
    latest = max(settings.earliest + 1, min(seconds - duration, seconds // 2))
    begin = int(random.integers(settings.earliest, latest))
    end = min(seconds, begin + duration)
    time = np.arange(seconds, dtype=np.float32)
    envelope = np.clip((time - begin) / random.uniform(2, 20), 0, 1) * (time < end)
    effect = np.full(len(names), fault.fleet, np.float32)
    effect[job.pipeline == job.pipeline[machine]] = max(fault.pipeline, fault.fleet)
    effect[machine] = 1.0
    sizes = _sizes(fault, settings, random)
    for column, name in enumerate(settings.metrics):
        if name in sizes:
            values[:, column] += np.float32(sizes[name]) * effect[:, None] * envelope
    return {
        "machine": names[machine],
        "fault": fault.name,
        "start": EPOCH + begin,
        "end": EPOCH + end,
        "shown": tuple(name for name in settings.metrics if name in sizes),
    }


def _sizes(fault: Fault, settings: Settings, random: np.random.Generator) -> dict[str, float]:
    """Change of each metric; a fault shows in at least one, which may not be recorded."""
    shows: list[tuple[tuple[str, ...], float]] = []
    while not shows:
        shows = [(metrics, size) for metrics, share, size in fault.shows if random.random() < share]
    strength = random.lognormal(np.log(1.1), 0.4) / settings.difficulty
    return {
        name: size * strength * random.lognormal(0, 0.25) for names, size in shows for name in names
    }


def _downsample(values: np.ndarray, period: int) -> np.ndarray:
    """Means over `period` seconds of the samples that are not NaN."""
    if period == 1:
        return values
    length = values.shape[2] // period * period
    samples = values[:, :, :length].reshape(*values.shape[:2], -1, period)
    finite = np.isfinite(samples)
    count = finite.sum(axis=3)
    total = np.where(finite, samples, 0).sum(axis=3)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def _drop_samples(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Sets lost samples and outages to NaN, in place; a machine loses all metrics together."""
    num_machines, _, seconds = values.shape
    lost = random.random((num_machines, seconds), np.float32) < settings.missing
    for machine in np.flatnonzero(random.random(num_machines) < settings.outages):
        begin = random.integers(seconds)
        lost[machine, begin : begin + random.integers(5, 41)] = True
    np.copyto(values, np.nan, where=lost[:, None])


@dataclass(frozen=True)
class SimulateOptions:
    """Simulated fleet to write."""

    out: tyro.conf.Positional[str]
    """The file (.npz) to write."""
    machines: int | None = 32
    """Number of machines; None samples 4 to 1,500."""
    seconds: int = 900
    """Length of the record."""
    metrics: tuple[str, ...] = PRODUCTION
    """Metrics to record."""
    clean: bool = False
    """Simulate no fault."""
    fault: str | None = None
    """The fault, such as "PCIe downgrading"; None samples one from the published mix."""
    difficulty: float = 1.0
    """Divides how far the fault moves the metrics."""
    seed: int = 0
    """The same seed gives the same fleet."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    request = parse_flags(SimulateOptions, "python -m benchmarks.faults simulate", arguments)
    check_seed(request.seed)
    settings = Settings(
        machines=request.machines,
        seconds=request.seconds,
        metrics=request.metrics,
        faulty=not request.clean,
        fault=request.fault,
        difficulty=request.difficulty,
    )
    incident = simulate(settings, request.seed)
    incident.fleet.save(request.out)
    print(f"{request.out}: {len(incident.fleet.machines)} machines for {request.seconds} s")
    if incident.machine is None:
        print("nothing fails")
    else:
        begin, end = incident.start - EPOCH, incident.end - EPOCH
        shown = ", ".join(incident.shown) or "none of the recorded metrics"
        print(f"{incident.fault} on {incident.machine} from {begin:.0f} to {end:.0f} s, in {shown}")
    return 0
