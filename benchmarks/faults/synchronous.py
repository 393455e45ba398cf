"""Simulated fleets of synchronous training: what a slow machine does follows from its steps.

In the simulators of `jrl.faults` a fault adds a number to some metrics. Here a step is computed:
the stages of each pipeline take their microbatches, pipelines wait for the slowest at the
all-reduce, and all metrics are the time that a machine spends in each *state* times the level of
the metric in it. A slow machine computes while the others spin in collectives: they keep their duty
cycle and some power, and lose tensor activity.

The mechanisms are those that descriptions of clusters name; sizes are our choices.

* Machines wait for one another, and one that is slow by half slows the whole job; slow clocks,
  degraded links and contended processors are the frequent causes (MegaScale, NSDI 2024; Falcon,
  2024, on fail-slow faults). Spinning GPUs are reported as busy.
* Faults last minutes, PFC packets rise on the machine with the degraded link (Minder, NSDI 2025).
* GPUs of one kind differ in power and speed for good, temperature follows power, and all of a fleet
  moves together at checkpoints and evaluations (Llama 3, 2024, section 3.3.4).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from benchmarks.faults.simulate.healthy import Job
from benchmarks.faults.simulate.incident import Incident
from jrl.faults.collect.fleet import Fleet

START = 1_790_000_000.0
BUSY, GAP, SPIN, COMMUNICATE, OPTIMIZE, IDLE, EVALUATE = range(7)
STATES = 7
"""Computing; the GPU stalled by its own host; waiting in a collective; moving data; the optimizer;
a checkpoint; an evaluation."""
LEVELS = {
    #                        busy    gap   spin  comm. optim.  idle  eval.
    "gpu_duty_cycle": (98.0, 5.0, 99.0, 98.0, 97.0, 1.0, 90.0),
    "gpu_power_draw": (650.0, 150.0, 360.0, 390.0, 430.0, 115.0, 480.0),
    "graphics_engine_activity": (96.0, 5.0, 94.0, 93.0, 92.0, 1.0, 82.0),
    "tensor_core_activity": (62.0, 1.0, 0.5, 0.5, 2.0, 0.0, 33.0),
    "sm_activity": (88.0, 3.0, 14.0, 22.0, 75.0, 0.5, 68.0),
    "gpu_memory_bandwidth": (48.0, 2.0, 3.0, 14.0, 78.0, 0.5, 36.0),
    "gpu_clock": (1700.0, 1950.0, 1900.0, 1900.0, 1850.0, 1980.0, 1800.0),
    "nvlink_bandwidth": (260.0, 5.0, 2.0, 330.0, 15.0, 0.0, 150.0),
    "rdma_throughput": (3.0, 0.1, 0.2, 38.0, 1.0, 4.0, 1.0),
    "pfc_tx_packet_rate": (60.0, 20.0, 30.0, 700.0, 30.0, 120.0, 20.0),
    "pcie_bandwidth": (6.0, 1.0, 0.5, 9.0, 2.0, 14.0, 4.0),
    "cpu_usage": (24.0, 26.0, 22.0, 23.0, 22.0, 31.0, 27.0),
    "disk_usage": (2.0, 3.0, 1.5, 1.5, 1.5, 45.0, 3.0),
}
"""Level of each metric in each state, in its unit."""
ALWAYS = (
    "pfc_tx_packet_rate",
    "cpu_usage",
    "gpu_duty_cycle",
    "gpu_power_draw",
    "graphics_engine_activity",
    "tensor_core_activity",
    "nvlink_bandwidth",
)
"""Recorded in each fleet; the others in some."""
SOMETIMES = (
    "gpu_temperature",
    "gpu_clock",
    "sm_activity",
    "gpu_memory_bandwidth",
    "pcie_bandwidth",
    "rdma_throughput",
    "disk_usage",
)
GAUGES = ("gpu_duty_cycle", "gpu_power_draw", "gpu_clock", "gpu_temperature")
"""Readings of the last seconds; the others are means between two readings, as of counters and of
DCGM's profiling metrics."""
SENSOR = {
    "pfc_tx_packet_rate": 0.5,
    "cpu_usage": 0.12,
    "disk_usage": 0.4,
    "rdma_throughput": 0.06,
    "pcie_bandwidth": 0.08,
    "nvlink_bandwidth": 0.04,
    "gpu_clock": 0.01,
    "gpu_temperature": 0.01,
}
"""Noise of one second, relative; `OTHER_SENSOR` for the rest."""
OTHER_SENSOR = 0.025
UNEVEN = {
    "pfc_tx_packet_rate": 0.25,
    "cpu_usage": 0.06,
    "disk_usage": 0.2,
    "gpu_power_draw": 0.025,
    "gpu_temperature": 0.07,
}
"""Permanent relative differences between machines; `OTHER_UNEVEN` for the rest."""
OTHER_UNEVEN = 0.006
FAULTS = ("slow clock", "thermal throttling", "degraded link", "busy processor", "paging")
SLOWDOWNS = {"severe": (1.6, 3.0), "medium": (1.25, 1.6), "mild": (1.08, 1.25)}
"""By level, how many times as long the affected part of the machine's step takes."""


@dataclass(frozen=True)
class Synchronous:
    """Distribution of fleets; a seed samples one.

    Attributes:
      level: of the fault, a key of `SLOWDOWNS`; None for a healthy fleet.
      machines: least and greatest number.
      seconds: length of the record.
      earliest: seconds before which no fault begins.
      period: seconds between two samples; None samples it from 1 to 30.
    """

    level: str | None = None
    machines: tuple[int, int] = (4, 96)
    seconds: int = 2400
    earliest: int = 700
    period: int | None = None


@dataclass
class _Fault:
    """A fault of one machine: how much longer its parts take at each second, 1 in health."""

    kind: str
    machine: int
    begin: float
    end: float
    size: float
    ramp: float
    share: float

    def slowdown(self, time: float) -> float:
        """How many times as long the affected part takes at a time."""
        inside = self.begin <= time < self.end
        return 1 + (self.size - 1) * min(1.0, (time - self.begin) / self.ramp) * inside


def simulate(settings: Synchronous, seed: int) -> Incident:
    """The fleet of a seed; the same settings and seed give the same values."""
    random = np.random.default_rng(seed)
    low, high = settings.machines
    wanted = int(np.exp(random.uniform(np.log(low), np.log(high + 1))))
    depth = int(random.choice([each for each in (1, 2, 4, 8) if 2 * each <= wanted]))
    count = max(wanted // depth, 2) * depth
    period = settings.period or int(random.choice([1, 1, 2, 5, 10, 15, 15, 30]))
    fault = _sample_fault(settings, count, random)
    shares = _states(settings, count, depth, fault, random)
    names = tuple(f"node-{row:04d}" for row in range(count))
    metrics = ALWAYS + tuple(name for name in SOMETIMES if random.random() < 0.5)
    values = _metrics(metrics, shares, fault, random)
    values = _sampled(values, metrics, period, random)
    fleet = Fleet(names, metrics, START, float(period), values)
    load = np.ones(settings.seconds, np.float32)
    row = np.arange(count)
    job = Job(row // depth, row % depth, shares[BUSY], 1 - shares[IDLE], load)
    if fault is None:
        return Incident(fleet, job)
    begin, end = START + fault.begin, START + min(fault.end, settings.seconds)
    return Incident(fleet, job, names[fault.machine], fault.kind, begin, end, metrics)


def _sample_fault(settings: Synchronous, count: int, random: np.random.Generator) -> _Fault | None:
    if settings.level is None:
        return None
    begin = random.uniform(settings.earliest, settings.seconds - 900)
    kind = str(random.choice(FAULTS))
    ramp = {"thermal throttling": 120.0, "paging": 240.0}.get(kind, 10.0)
    return _Fault(
        kind,
        int(random.integers(count)),
        begin,
        begin + random.uniform(480, 1500),
        random.uniform(*SLOWDOWNS[settings.level]),
        ramp * random.uniform(0.5, 1.5),
        float(random.choice([1.0, 1.0, 0.5])),
    )


def _states(
    settings: Synchronous, count: int, depth: int, fault: _Fault | None, random: np.random.Generator
) -> Float[np.ndarray, "state machine time"]:
    """Share of each second that each machine spends in each state."""
    length = np.exp(random.uniform(np.log(2), np.log(120)))
    microbatches = int(random.choice([1, 2, 4])) * depth
    communicate, optimize = random.uniform(0.05, 0.25) * length, random.uniform(0.01, 0.08) * length
    stage = np.arange(count) % depth
    loads = 1 + random.uniform(0, 0.12) * random.standard_normal(depth)
    loads[-1] *= random.uniform(1, 1.15)  # the head
    speed = 1 + np.abs(random.normal(0, random.uniform(0.002, 0.02), count))
    jitter = random.uniform(0.005, 0.06)
    fill = (microbatches + depth - 1) / microbatches
    compute = (length - communicate - optimize) / fill * np.maximum(loads, 0.5)[stage] * speed
    schedule = _Schedule(settings.seconds, random)
    stragglers = _stragglers(settings.seconds, count, random)
    now, total = 0.0, np.zeros((STATES, count))
    breaks, history = [np.zeros(count)], [total]

    def advance(durations: np.ndarray, until: np.ndarray) -> None:
        nonlocal total
        total = total + durations
        breaks.append(until)
        history.append(total)

    while now < settings.seconds:
        pause = schedule.due(now)
        if pause is not None:
            state, seconds = pause
            durations = np.zeros((STATES, count))
            durations[state] = seconds
            if state == EVALUATE:  # the forward pass waits for the slowest machine too
                busy, gap, _ = _slowed(compute.copy(), fault, now)
                seconds *= (busy + gap).max() / compute.max()
                shares = np.stack([busy, gap]) / (busy + gap).max()
                durations[[EVALUATE, GAP]] = seconds * shares
                durations[SPIN] = seconds * (1 - shares.sum(axis=0))
            advance(durations, np.full(count, now + seconds))
            now += seconds
            continue
        work = compute * random.lognormal(0, jitter) * random.lognormal(0, 0.004, count)
        busy, gap, moved = _slowed(work, fault, now)
        for machine, begin, end, size in stragglers:
            if begin <= now < end:
                gap[machine] += min((size - 1) * work[machine], end - now)
        occupied = (busy + gap).reshape(-1, depth)
        slowest = occupied.max(axis=1)
        rest = (occupied.sum(axis=1) - slowest) / microbatches
        pipeline = np.repeat(slowest + rest, depth)
        longest = pipeline.max()
        durations = np.zeros((STATES, count))
        durations[BUSY], durations[GAP], durations[SPIN] = busy, gap, pipeline - busy - gap
        advance(durations, now + pipeline)
        durations = np.zeros((STATES, count))
        durations[SPIN] = longest - pipeline + 1e-6
        now += longest + 1e-6
        advance(durations, np.full(count, now))
        for state, seconds in ((COMMUNICATE, moved * communicate), (OPTIMIZE, optimize)):
            durations = np.zeros((STATES, count))
            durations[state] = seconds
            now += seconds
            advance(durations, np.full(count, now))
    time = np.arange(settings.seconds + 1.0)
    at, integrals = np.stack(breaks, 1), np.stack(history, 2)
    shares = np.empty((STATES, count, settings.seconds), np.float32)
    for row in range(count):
        for state in range(STATES):
            shares[state, row] = np.diff(np.interp(time, at[row], integrals[state, row]))
    return shares


def _slowed(
    busy: np.ndarray, fault: _Fault | None, now: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds of computing and of stalls of each machine, and how much longer transfers take."""
    gap = np.zeros(len(busy))
    if fault is None:
        return busy, gap, 1.0
    slow, row = fault.slowdown(now), fault.machine
    if fault.kind == "degraded link":
        return busy, gap, 1 + 3 * (slow - 1)
    if fault.kind in ("slow clock", "thermal throttling"):
        busy = busy.copy()
        busy[row] *= slow
    else:
        gap[row] = (slow - 1) * busy[row]
    return busy, gap, 1.0


class _Schedule:
    """Checkpoints and evaluations of a job: when each is due, and for how long."""

    def __init__(self, seconds: int, random: np.random.Generator):
        self._random = random
        self._every = {IDLE: random.uniform(300, 2400), EVALUATE: random.uniform(1200, 5400)}
        self._length = {IDLE: random.uniform(4, 90), EVALUATE: random.uniform(40, 400)}
        self._next = {state: random.uniform(0, every) for state, every in self._every.items()}

    def due(self, now: float) -> tuple[int, float] | None:
        """The state and seconds of a pause that begins."""
        for state, time in self._next.items():
            if now >= time:
                length = self._length[state] * self._random.uniform(0.9, 1.1)
                self._next[state] = now + length + self._every[state]
                return state, length
        return None


def _stragglers(
    seconds: int, count: int, random: np.random.Generator
) -> list[tuple[int, float, float, float]]:
    """Hosts that stall their GPUs for seconds to two minutes and recover: machine, times, size."""
    rate = random.lognormal(np.log(0.4), 0.7) * (0.6 + count / 300) * seconds / 900
    events = []
    for _ in range(random.poisson(rate)):
        begin, length = random.uniform(0, seconds), np.clip(random.exponential(35), 4, 130)
        size = 1 + random.lognormal(np.log(0.3), 0.6)
        events.append((int(random.integers(count)), begin, begin + length, size))
    return events


def _metrics(
    metrics: tuple[str, ...],
    shares: Float[np.ndarray, "state machine time"],
    fault: _Fault | None,
    random: np.random.Generator,
) -> Float[np.ndarray, "machine metric time"]:
    """Metrics of all machines, second by second."""
    _, count, seconds = shares.shape
    values = np.empty((count, len(metrics), seconds), np.float32)
    slow = np.ones(seconds)
    if fault is not None:
        slow = np.array([fault.slowdown(second) for second in range(seconds)])
    for column, name in enumerate(metrics):
        source = "gpu_power_draw" if name == "gpu_temperature" else name
        levels = np.array(LEVELS[source])
        levels = levels * (1 + 0.06 * random.standard_normal(STATES))  # clusters differ
        value = np.tensordot(levels, shares, 1)
        if fault is not None:
            value[fault.machine] = _of_faulty(source, levels, shares[:, fault.machine], slow, fault)
        if name == "gpu_temperature":
            value = 30 + 0.06 * _low_pass(value, 60.0)
            if fault is not None and fault.kind == "thermal throttling":
                value[fault.machine] += 14 * np.minimum(slow - 1, 1.0)
        uneven = UNEVEN.get(name, OTHER_UNEVEN)
        value *= np.exp(uneven * random.standard_normal((count, 1)))
        sensor = SENSOR.get(name, OTHER_SENSOR) * random.lognormal(0, 0.2, (count, 1))
        slow_noise = 0.15 * sensor * _wander(count, seconds, random)
        value *= np.exp(sensor * random.standard_normal((count, seconds)) + slow_noise)
        if name in ("gpu_duty_cycle", "graphics_engine_activity", "sm_activity", "cpu_usage"):
            np.minimum(value, 100, out=value)
        values[:, column] = value
    return values


def _of_faulty(
    name: str, levels: np.ndarray, shares: np.ndarray, slow: np.ndarray, fault: _Fault
) -> Float[np.ndarray, "time"]:
    """One metric of the machine that fails."""
    value = levels @ shares
    if fault.kind in ("slow clock", "thermal throttling"):
        # `share` of its GPUs are slow; the others of the machine spin until these are done.
        sick = np.tile(levels[:, None], (1, len(slow)))
        if name == "gpu_power_draw":
            sick[BUSY] = 120 + (levels[BUSY] - 120) / slow**1.5
            sick[[SPIN, COMMUNICATE, OPTIMIZE]] = (
                120 + (levels[[SPIN, COMMUNICATE, OPTIMIZE]] - 120)[:, None] / slow
            )
        elif name == "gpu_clock":
            sick = np.minimum(sick, levels[BUSY] / slow)
        elif name in ("nvlink_bandwidth", "gpu_memory_bandwidth", "pcie_bandwidth"):
            sick[BUSY] = levels[BUSY] / slow
        done = shares.copy()
        done[BUSY] = shares[BUSY] / slow
        done[SPIN] = shares[SPIN] + shares[BUSY] * (1 - 1 / slow)
        return fault.share * (sick * shares).sum(0) + (1 - fault.share) * (levels @ done)
    if fault.kind == "degraded link" and name == "pfc_tx_packet_rate":
        value = value * (1 + 8 * (slow - 1))
    if fault.kind == "busy processor" and name == "cpu_usage":
        value = value + 40 * np.minimum(slow - 1, 1.2)
    if fault.kind == "paging":
        if name == "cpu_usage":
            value = value + 15 * np.minimum(slow - 1, 1.2)
        if name == "disk_usage":
            value = value + 30 * (slow - 1)
    return value


def _low_pass(values: np.ndarray, seconds: float) -> np.ndarray:
    out, rate = values.copy(), 1 - np.exp(-1 / seconds)
    for index in range(1, values.shape[1]):
        out[:, index] = out[:, index - 1] + rate * (values[:, index] - out[:, index - 1])
    return out


def _wander(count: int, seconds: int, random: np.random.Generator) -> np.ndarray:
    """Slow noise of variance about 1: knots every five minutes, joined by lines."""
    knots = random.standard_normal((count, seconds // 300 + 2))
    time = np.arange(seconds) / 300
    left = time.astype(int)
    return knots[:, left] * (1 - time + left) + knots[:, left + 1] * (time - left)


def _sampled(
    values: np.ndarray, metrics: tuple[str, ...], period: int, random: np.random.Generator
) -> np.ndarray:
    """Means over the period; in some fleets each machine is read at its own second of it.

    There gauges are means over their last seconds, while counters give means over the period.
    """
    count, _, seconds = values.shape
    size = seconds // period - 1
    offsets = np.zeros(count, int)
    gauge = np.zeros(len(metrics), bool)
    if period > 1 and random.random() < 0.3:
        offsets = random.integers(period, size=count)
        gauge = np.array([name in GAUGES for name in metrics])
    out = np.empty((count, len(metrics), size), np.float32)
    for row, offset in enumerate(offsets.tolist()):
        blocks = values[row, :, offset : offset + size * period].reshape(-1, size, period)
        recent = blocks[:, :, -min(period, 5) :].mean(2)
        out[row] = np.where(gauge[:, None], recent, blocks.mean(2))
    out[np.broadcast_to(random.random((count, 1, size)) < 0.01, out.shape)] = np.nan
    return out
