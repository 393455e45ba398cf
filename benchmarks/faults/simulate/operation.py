"""Hours of operation of a healthy fleet: training with checkpoints, evaluations and restarts.

`incident.simulate` makes a quarter of an hour with a fault. A false alarm depends on the rest of
the day: the fleet pauses and resumes together, and machines that differ permanently, by a per cent
or by a tenth, differ only while they work. This simulator shares no code and no noise with the
other one, so it also tests settings that were tuned there. Its rates and sizes are choices.

* **Phases** (`Schedule`): training; checkpoints, evaluations and rollouts, during which every
  metric has another level on all machines; restarts, after which machines may have other roles.
* **Differences between machines**: every GPU by a per cent or so, some machines by a tenth, stages
  of a pipeline by a few per cent, rank 0 in its CPU usage. They scale with the work.
* **Noise**: from sample to sample, and slow, with correlation times of 1, 4 and 16 minutes; bursts
  of seconds, slowdowns of up to 150 s that recover, and drifts over hours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jrl.checks import check_range
from jrl.faults.collect.fleet import Fleet

START = 1_780_000_000.0
"""Unix time at which simulated hours begin."""
TIME_CONSTANTS = (60.0, 240.0, 960.0)
"""Correlation times of slow noise, in seconds."""
THERMAL = 80.0
"""Seconds in which a GPU's temperature follows its power."""
STRAGGLING = 12.0
"""Mean seconds by which a machine resumes after the first one of a restart, a minute at most."""
LONGEST_SLOWDOWN = 150.0
"""Seconds after which a slowdown has recovered."""


@dataclass(frozen=True)
class Signal:
    """One metric of a working machine, relative to ``work - idle``.

    Attributes:
      name: as in the fleet.
      idle: level without work, in the metric's unit.
      work: mean level of training.
      checkpoint: share of the difference that a checkpoint has; likewise `evaluation`, `rollout`.
      noise: standard deviation of a sample of one second.
      slow: standard deviation of the slow noise.
      spread: standard deviation between machines, permanent.
      rhythm: what the compute phase of a training step adds over its communication phase.
      events: true if it is a rate of events, whose noise is lognormal.
      lag: true if it follows the work as temperatures do.
    """

    name: str
    idle: float
    work: float
    checkpoint: float
    evaluation: float
    rollout: float
    noise: float
    slow: float
    spread: float
    rhythm: float = 0.0
    events: bool = False
    lag: bool = False


SIGNALS = (
    Signal("pfc_tx_packet_rate", 2.0, 300.0, 0.1, 0.4, 0.3, 0.6, 0.08, 0.1, -0.5, events=True),
    Signal("cpu_usage", 4.0, 38.0, 1.3, 0.8, 1.4, 0.08, 0.015, 0.02),
    Signal("gpu_duty_cycle", 0.0, 95.0, 0.02, 0.85, 0.95, 0.02, 0.002, 0.003, 0.05),
    Signal("gpu_power_draw", 110.0, 620.0, 0.05, 0.6, 0.55, 0.04, 0.003, 0.02, 0.2),
    Signal("graphics_engine_activity", 0.0, 88.0, 0.0, 0.75, 0.85, 0.04, 0.003, 0.005, 0.2),
    Signal("tensor_core_activity", 0.0, 46.0, 0.0, 0.45, 0.2, 0.05, 0.004, 0.01, 0.4),
    Signal("nvlink_bandwidth", 0.0, 210.0, 0.0, 0.4, 0.5, 0.08, 0.005, 0.01, -0.5),
    Signal("gpu_temperature", 34.0, 64.0, 0.05, 0.65, 0.6, 0.01, 0.005, 0.08, lag=True),
    Signal("gpu_clock", 1980.0, 1740.0, 0.1, 0.7, 0.7, 0.03, 0.01, 0.08),
)
"""The metrics, of one GPU or the mean of all GPUs of a machine."""


@dataclass(frozen=True)
class Schedule:
    """Seconds between the phases of a job, and the length of each; 0 between is never.

    Attributes:
      checkpoint: from the end of one to the next, and its length.
      evaluation: likewise.
      restart: mean time from one to the next, which is exponential, and the length.
      rollout: length of the rollouts before each training phase, and of that one.
    """

    checkpoint: tuple[float, float] = (600.0, 20.0)
    evaluation: tuple[float, float] = (0.0, 0.0)
    restart: tuple[float, float] = (0.0, 0.0)
    rollout: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def sample(cls, random: np.random.Generator) -> "Schedule":
        """Schedule of a random job; one in four alternates between rollouts and training."""
        rollout = (random.uniform(60, 400), random.uniform(60, 400))
        return cls(
            checkpoint=(random.uniform(300, 1800), random.uniform(8, 60)),
            evaluation=(random.uniform(1800, 7200), random.uniform(60, 600)),
            restart=(28800.0, random.uniform(120, 480)),
            rollout=rollout if random.random() < 0.25 else (0.0, 0.0),
        )


@dataclass(frozen=True)
class Operation:
    """Distribution of healthy hours; a seed samples one of them.

    Attributes:
      machines: how many, at least 3.
      hours: length, above 0.
      period: seconds between two samples; each is the mean over them.
      schedule: phases of the job; None samples them.
      offsets: scales all permanent differences between machines, at least 0.
      drifts: share of machines that drift in one metric, in [0, 1].
      disturbances: scales how often bursts and slowdowns come, at least 0.
      missing: share of samples that are lost, in [0, 1).

    Raises:
      ValueError: for a setting outside of its range.
    """

    machines: int = 1024
    hours: float | int = 6.0
    period: float | int = 15.0
    schedule: Schedule | None = None
    offsets: float | int = 1.0
    drifts: float | int = 0.05
    disturbances: float | int = 1.0
    missing: float | int = 0.01

    def __post_init__(self):
        check_range(self, ("machines",), 3)
        for name in ("hours", "period"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0.")
        for name in ("offsets", "disturbances"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0.")
        for name, most in (("drifts", 1.0), ("missing", 0.99)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, {most}].")


class Phase(NamedTuple):
    """A phase of the whole fleet; times in seconds from the start."""

    name: str
    begin: float
    end: float


def simulate_operation(settings: Operation, seed: int) -> tuple[Fleet, tuple[Phase, ...]]:
    """Healthy hours of a seed, and their phases other than training.

    The same settings and seed give the same values.
    """
    random = np.random.default_rng(seed)
    num_samples = round(settings.hours * 3600 / settings.period)
    shape = (settings.machines, num_samples)
    schedule = settings.schedule or Schedule.sample(random)
    phases = list(_phases(schedule, num_samples * settings.period, random))
    shares = _phase_shares(phases, shape, settings.period, random)
    roles = _roles(phases, shape, settings.period, random)
    rhythm = _rhythm(shape, settings.period, random)
    values = np.empty((shape[0], len(SIGNALS), shape[1]), np.float32)
    for column, signal in enumerate(SIGNALS):
        work = _work(signal, shares, rhythm, settings.period)
        differences = _differences(signal, roles, settings, random)
        noise = _noise(signal, shape, settings, random)
        if signal.events:
            factor = work * np.exp(differences + noise)
        else:
            factor = work * (1 + differences) + (work + 0.05) * noise
        values[:, column] = signal.idle + (signal.work - signal.idle) * factor
    _disturb(values, settings, random)
    np.maximum(values, 0, out=values)
    duty_cycle = [signal.name for signal in SIGNALS].index("gpu_duty_cycle")
    np.minimum(values[:, duty_cycle], 100, out=values[:, duty_cycle])
    lost = random.random(shape, np.float32) < settings.missing
    np.copyto(values, np.nan, where=lost[:, None])
    names = tuple(f"machine-{row:04d}" for row in range(shape[0]))
    metrics = tuple(signal.name for signal in SIGNALS)
    return Fleet(names, metrics, START, float(settings.period), values), tuple(phases)


def _phases(
    schedule: Schedule, seconds: float | int, random: np.random.Generator
) -> Iterator[Phase]:
    """Phases other than training, in order and without overlap."""
    due: dict[str, float] = {}
    for name in ("checkpoint", "evaluation", "restart", "rollout"):
        if getattr(schedule, name)[0] > 0:
            due[name] = _until_next(schedule, name, random) * random.random()
    while due:
        name = min(due, key=lambda each: due[each])
        begin = due[name]
        if begin >= seconds:
            return
        length = getattr(schedule, name)[0 if name == "rollout" else 1]
        end = begin + length * random.uniform(0.9, 1.1)
        yield Phase(name, begin, end)
        due[name] = end + _until_next(schedule, name, random)
        due = {each: max(time, end) for each, time in due.items()}


def _until_next(schedule: Schedule, name: str, random: np.random.Generator) -> float:
    if name == "restart":
        return float(random.exponential(schedule.restart[0]))
    return getattr(schedule, name)[1 if name == "rollout" else 0] * random.uniform(0.95, 1.05)


def _cover(
    begin: Float[np.ndarray, "machine"],
    end: Float[np.ndarray, "machine"],
    period: float | int,
    num_samples: int,
) -> tuple[slice, Float[np.ndarray, "machine time"]]:
    """Share of each sample inside ``[begin, end)``, for the samples where any is above 0."""
    first = int(np.clip(begin.min() // period, 0, num_samples))
    last = int(np.clip(-(-end.max() // period), first, num_samples))
    left = period * np.arange(first, last)
    inside = np.minimum(end[:, None], left + period) - np.maximum(begin[:, None], left)
    return slice(first, last), np.clip(inside / period, 0, 1).astype(np.float32)


def _phase_shares(
    phases: list[Phase], shape: tuple[int, int], period: float | int, random: np.random.Generator
) -> dict[str, Float[np.ndarray, "machine time"]]:
    """Share of each sample that a machine spends in each phase; the rest is training."""
    shares: dict[str, np.ndarray] = {}
    for phase in phases:
        share = shares.setdefault(phase.name, np.zeros(shape, np.float32))
        length = phase.end - phase.begin
        begin = phase.begin + 0.5 * np.abs(random.standard_normal(shape[0]))
        if phase.name == "restart":
            end = phase.end + np.minimum(random.exponential(STRAGGLING, shape[0]), 60)
        elif phase.name == "checkpoint":
            end = phase.begin + length * random.lognormal(0, 0.1, shape[0])
        else:
            end = phase.end + np.abs(random.standard_normal(shape[0]))
        when, cover = _cover(begin, end, period, shape[1])
        share[:, when] = np.maximum(share[:, when], cover)
    total = np.maximum(sum(shares.values(), np.zeros((), np.float32)), 1)
    return {name: share / total for name, share in shares.items()}


def _roles(
    phases: list[Phase], shape: tuple[int, int], period: float | int, random: np.random.Generator
) -> list[tuple[slice, Int[np.ndarray, "machine"], Float[np.ndarray, "machine"]]]:
    """Rank and pipeline stage (0 to 1) of each machine, for the samples between two restarts.

    Every other restart gives the machines other ranks.
    """
    depth = int(random.choice([1, 2, 4, 8]))
    edges = [phase.begin for phase in phases if phase.name == "restart"]
    indices = [0, *(min(shape[1], int(edge // period)) for edge in edges), shape[1]]
    ranks = np.arange(shape[0])
    roles = []
    for first, last in pairwise(indices):
        roles.append((slice(first, last), ranks, (ranks % depth) / depth))
        if random.random() < 0.5:
            ranks = random.permutation(ranks)
    return roles


def _rhythm(
    shape: tuple[int, int], period: float | int, random: np.random.Generator
) -> Float[np.ndarray, "machine time"]:
    """Share of each sample in the compute phase of a training step, less its mean."""
    step, duty = random.uniform(4, 40), random.uniform(0.6, 0.85)
    skew = 0.5 * random.standard_normal((shape[0], 1))
    left = period * np.arange(shape[1]) + skew + random.uniform(0, step)

    def computed(time: np.ndarray) -> np.ndarray:  # seconds of computation until then
        return duty * step * np.floor(time / step) + np.minimum(np.mod(time, step), duty * step)

    return ((computed(left + period) - computed(left)) / period - duty).astype(np.float32)


def _work(
    signal: Signal, shares: dict[str, np.ndarray], rhythm: np.ndarray, period: float | int
) -> Float[np.ndarray, "machine time"]:
    """Work of each machine over time; 1 is the mean of training."""
    training = 1 - sum(shares.values(), np.zeros((), np.float32))
    work = training * (1 + signal.rhythm * rhythm)
    for name, share in shares.items():
        work = work + share * (0.0 if name == "restart" else getattr(signal, name))
    return _low_pass(work, THERMAL, period) if signal.lag else work


def _low_pass(work: np.ndarray, seconds: float, period: float | int) -> np.ndarray:
    """First-order response with this time constant."""
    rate = np.float32(1 - np.exp(-period / seconds))
    out = np.array(work.T)  # a time is contiguous
    for index in range(1, len(out)):
        out[index] = out[index - 1] + rate * (out[index] - out[index - 1])
    return out.T


def _differences(
    signal: Signal,
    roles: list[tuple[slice, np.ndarray, np.ndarray]],
    settings: Operation,
    random: np.random.Generator,
) -> Float[np.ndarray, "machine time"]:
    """Relative differences between machines: GPUs, some machines by a tenth, stages, rank 0."""
    machines = settings.machines
    lasting = signal.spread * random.standard_normal(machines)
    unusual = random.random(machines) < 0.006
    lasting += unusual * random.choice([-1, 1], machines) * random.lognormal(-2.5, 0.5, machines)
    stage_effect = random.normal(0, 2 * signal.spread)
    differences = np.empty((machines, roles[-1][0].stop), np.float32)
    for when, ranks, stages in roles:
        of_role = stage_effect * stages + 0.3 * (ranks == 0) * (signal.name == "cpu_usage")
        differences[:, when] = settings.offsets * (lasting + of_role)[:, None]
    return differences


def _noise(
    signal: Signal, shape: tuple[int, int], settings: Operation, random: np.random.Generator
) -> Float[np.ndarray, "machine time"]:
    """Noise from sample to sample, slow noise and drifts; machines differ in how noisy they are."""
    size = random.lognormal(0, 0.25, (shape[0], 1)).astype(np.float32)
    noise = signal.noise / settings.period**0.5 * random.standard_normal(shape, np.float32)
    slow = signal.slow / len(TIME_CONSTANTS) ** 0.5
    for seconds in TIME_CONSTANTS:
        noise += slow * _correlated(shape, seconds, settings.period, random)
    noise *= size
    time = settings.period * np.arange(shape[1], dtype=np.float32)
    for row in np.flatnonzero(random.random(shape[0]) < settings.drifts / len(SIGNALS)):
        cycle = random.uniform(2, 8) * 3600
        noise[row] += np.float32(random.uniform(0, 0.1)) * np.sin(
            np.float32(2 * np.pi / cycle) * time + np.float32(random.uniform(0, 2 * np.pi))
        )
    return noise


def _correlated(
    shape: tuple[int, int], seconds: float, period: float | int, random: np.random.Generator
) -> Float[np.ndarray, "machine time"]:
    """Ornstein-Uhlenbeck process of variance 1 with this correlation time."""
    keep = np.float32(np.exp(-period / seconds))
    values = random.standard_normal(shape[::-1], np.float32)  # a time is contiguous
    values[1:] *= np.float32((1 - keep**2) ** 0.5)
    for index in range(1, len(values)):
        values[index] += keep * values[index - 1]
    return values.T


def _disturb(values: np.ndarray, settings: Operation, random: np.random.Generator) -> None:
    """Adds bursts of seconds in one metric, and slowdowns of up to `LONGEST_SLOWDOWN` in some."""
    machines, num_metrics, num_samples = values.shape
    seconds = num_samples * settings.period
    hours = settings.disturbances * machines * seconds / 3600
    for _ in range(random.poisson(hours * 0.5)):
        length = np.clip(random.lognormal(np.log(8), 0.8), 2, 60)
        sign = 1 if random.random() < 0.5 else -1
        size = sign * random.lognormal(np.log(0.2), 0.6)
        _scale(values, [int(random.integers(num_metrics))], size, length, settings.period, random)
    for _ in range(random.poisson(settings.disturbances * seconds / 900 * (0.6 + machines / 300))):
        length = np.clip(random.exponential(40), 5, LONGEST_SLOWDOWN)
        columns = random.choice(num_metrics, random.integers(1, 4), replace=False)
        size = -min(0.9, random.lognormal(np.log(0.3), 0.5))
        _scale(values, columns.tolist(), size, length, settings.period, random)


def _scale(
    values: np.ndarray,
    columns: list[int],
    size: float,
    length: float,
    period: float | int,
    random: np.random.Generator,
) -> None:
    """Multiplies metrics of a random machine by ``1 + size`` for some seconds, in place."""
    row = int(random.integers(values.shape[0]))
    begin = np.array([random.uniform(0, values.shape[2] * period)])
    when, cover = _cover(begin, begin + length, period, values.shape[2])
    values[row, columns, when] *= 1 + np.float32(max(size, -1)) * cover[0]
