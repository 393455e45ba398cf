"""Healthy fleet: the job that all machines run, and their readings, with disturbances.

Values are shares of a metric's capacity until `incident.simulate` turns them into its unit. Noise
that is normal and independent would be averaged away by anything. What is recorded once a second in
production is not like that:

* A counter is read late now and then: what one second lacks the next has too much (`read_late`).
* A lone reading is far off: activity is read while a GPU waits for its next kernel, or CPU usage
  while a process of the host wakes up (`misread`).
* Metrics burst for seconds, with sizes and lengths over orders of magnitude: pause frames where
  flows of a collective meet, CPU usage where logs are shipped or Python collects garbage, activity
  where a loader is late (`burst`). A burst is in one metric, or in one group.

The rates of all this differ more between fleets than within one: networks are tuned or not, hosts
shared or not. The kinds are well known; their rates and sizes are not published and are our
choices, see `docs/faults.md`.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int

from benchmarks.faults.simulate.settings import METRICS, Metric, Settings

PIPELINES = (1, 2, 4, 8)
DRIFT_SECONDS = 30
"""Between two knots of the wandering."""
UNEVEN = 0.25
"""Deviation of the logarithm of how noisy a machine is."""
LATE_SHARE = 0.004
"""Median share of the seconds in which a machine's counters are read late."""
LONGEST_BURST = 60
"""Seconds after which a burst is over."""
LONGEST_SLOWDOWN = 150
"""Seconds after which a transient slowdown has recovered."""
MAX_DRIFT = 0.25
"""Most of a metric's level that a healthy machine drifts away in 15 minutes."""
EVENTS, EVENT_NOISE = 6.0, 0.8
"""Growth of rates of events, and the deviation of their logarithm from second to second."""
MEDIAN_OFFSET = 0.08
"""Median size of a difference that is there all the time: a third of what a fault changes."""


@dataclass(frozen=True)
class Job:
    """A synchronous job in 3D parallelism, machine by machine.

    Attributes:
      pipeline: which data-parallel replica a machine belongs to; its stages wait for each other.
      stage: which pipeline stage it holds.
      computing: share of each second that a machine spends in the compute phase of its step.
      busy: share of each second that it is not held up by a checkpoint.
      load: how much work a step holds, relative to the mean; the same for all machines.
    """

    pipeline: Int[np.ndarray, "machine"]
    stage: Int[np.ndarray, "machine"]
    computing: Float32[np.ndarray, "machine time"]
    busy: Float32[np.ndarray, "machine time"]
    load: Float32[np.ndarray, "time"]


def make_job(
    num_machines: int, seconds: int, clock_skew: float | int, random: np.random.Generator
) -> Job:
    """A job with sampled period, layout, load shifts and checkpoints.

    Clocks are off by a normal error of `clock_skew` seconds, which shifts what a machine reports.
    """
    depth = int(random.choice([size for size in PIPELINES if size <= num_machines // 2] or [1]))
    machine = np.arange(num_machines)
    stage, pipeline = machine % depth, machine // depth
    period, share = random.uniform(4.0, 30.0), random.uniform(0.6, 0.85)
    skew = clock_skew * random.standard_normal(num_machines)
    late = 0.03 * period * stage / depth
    clock = np.arange(seconds) + (skew - late)[:, None]
    inside = np.mod(clock + random.uniform(0, period), period)
    # Each edge of the compute phase is spread over the second that samples it.
    half = share * period / 2
    computing = np.clip(0.5 + half - np.abs(inside - half), 0, 1).astype(np.float32)
    busy = _checkpoints(clock, random)
    return Job(pipeline, stage, computing, busy, _load(seconds, random))


def _checkpoints(clock: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Activity: 1 while training, less during a checkpoint, whose length differs by machine."""
    num_machines, seconds = clock.shape
    every, first = random.uniform(300, 900), random.uniform(0, 600)
    busy = np.ones(clock.shape, np.float32)
    for begin in np.arange(first, seconds, every):
        length = random.uniform(8, 25) * random.lognormal(0, 0.1, num_machines)
        inside = (clock >= begin) & (clock < begin + length[:, None])
        busy[inside] = random.uniform(0.1, 0.4)
    return busy


def _load(seconds: int, random: np.random.Generator) -> np.ndarray:
    """Steps of up to a tenth, where batches become longer or shorter."""
    load = np.ones(seconds, np.float32)
    for _ in range(random.poisson(seconds / 600)):
        load[random.integers(seconds) :] *= random.uniform(0.9, 1.1)
    return load


def simulate_healthy(
    job: Job, settings: Settings, random: np.random.Generator
) -> Float32[np.ndarray, "machine metric time"]:
    """Metrics of all machines with noise, wandering, load shifts, checkpoints and stragglers."""
    shape = job.computing.shape
    values = np.empty((shape[0], len(settings.metrics), shape[1]), np.float32)
    for column, name in enumerate(settings.metrics):
        values[:, column] = _rhythm(job, METRICS[name]) + _noise(shape, METRICS[name], random)
    disturb(values, settings, random)
    return values


def _rhythm(job: Job, metric: Metric) -> np.ndarray:
    active = job.load * job.busy
    if metric.name == "disk_usage":
        return metric.level + (1 - job.busy) * 0.6
    steady = metric.name in ("cpu_usage", "memory_usage", "gpu_memory_used", "tcp_throughput")
    phase = metric.level + metric.compute * (job.computing - 0.72)
    return phase.astype(np.float32) * (1.0 if steady else active)


def _noise(shape: tuple[int, int], metric: Metric, random: np.random.Generator) -> np.ndarray:
    num_machines, seconds = shape
    noise = metric.noise * random.standard_normal(shape, np.float32)
    noise *= random.lognormal(0, UNEVEN, (num_machines, 1)).astype(np.float32)
    noise += metric.spread * random.standard_normal((num_machines, 1), np.float32)
    noise += metric.drift * _wandering(num_machines, seconds, random)
    return noise


def _wandering(num_machines: int, seconds: int, random: np.random.Generator) -> np.ndarray:
    """Independent knots, joined by straight lines."""
    knots = random.standard_normal((num_machines, seconds // DRIFT_SECONDS + 2), np.float32)
    time = np.arange(seconds, dtype=np.float32) / DRIFT_SECONDS
    left = time.astype(int)
    right = time - left
    return knots[:, left] * (1 - right) + knots[:, left + 1] * right


def disturb(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Adds all of them to ``[machine, metric, time]`` shares of capacity, in place."""
    for add in (burst, slow_transiently, offset, misread, read_late):
        add(values, settings, random)
    if settings.drifts > 0:
        drift(values, settings, random)


def _sample_events(
    median: float, num_machines: int, seconds: int, settings: Settings, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Machines and seconds of events that come at some rate per machine and second.

    One fleet in six has three times the median rate, one in six a third.
    """
    rate = settings.disturbances * median * random.lognormal(0, 1.1)
    count = random.poisson(rate * num_machines * seconds)
    return random.integers(num_machines, size=count), random.integers(seconds, size=count)


def read_late(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Moves half or more of a second into the next, in all counters of a machine simultaneously."""
    num_machines, _, seconds = values.shape
    machine, time = _sample_events(LATE_SHARE, num_machines, seconds - 1, settings, random)
    late = random.uniform(0.5, 1, time.size).astype(np.float32)
    for column, name in enumerate(settings.metrics):
        if METRICS[name].counter:
            moved = values[machine, column, time] * late
            values[machine, column, time] -= moved
            values[machine, column, time + 1] += moved


def misread(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Lone readings: of a GPU next to nothing, of all else too much."""
    num_machines, _, seconds = values.shape
    for column, name in enumerate(settings.metrics):
        metric = METRICS[name]
        machine, time = _sample_events(metric.spikes, num_machines, seconds, settings, random)
        if metric.gpu:
            left = random.uniform(0, 0.5, time.size)
            values[machine, column, time] *= left.astype(np.float32)
        else:
            size = random.exponential(metric.spike, time.size)
            values[machine, column, time] += size.astype(np.float32)


def burst(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Seconds to a minute above, or for activity below, what the others have."""
    num_machines, _, seconds = values.shape
    for columns, rate, size in _groups(settings):
        events = _sample_events(rate, num_machines, seconds, settings, random)
        for machine, begin in zip(*events, strict=True):
            length = int(np.clip(random.lognormal(np.log(8), 0.8), 2, LONGEST_BURST))
            change = size * random.lognormal(0, 0.6)
            values[machine, columns, begin : begin + length] += np.float32(change)


def _groups(settings: Settings) -> list[tuple[list[int], float, float]]:
    """Columns that burst together, how often per second, and by how much in the median."""
    metrics = [METRICS[name] for name in settings.metrics]
    gpu = [column for column, metric in enumerate(metrics) if metric.gpu]
    groups = [([c], m.bursts / 3600, m.burst) for c, m in enumerate(metrics) if not m.gpu]
    if gpu:
        first = metrics[gpu[0]]
        groups.append((gpu, first.bursts / 3600, -first.burst))
    return groups


def slow_transiently(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Machines that lag for a while and recover, with metrics and sizes like those of a fault."""
    num_machines, num_metrics, seconds = values.shape
    rate = settings.disturbances * seconds / 900 * (0.6 + num_machines / 300)
    for _ in range(random.poisson(rate)):
        machine = random.integers(num_machines)
        length = int(np.clip(random.exponential(40), 5, LONGEST_SLOWDOWN))
        begin = random.integers(-length + 1, seconds)
        when = slice(max(0, begin), begin + length)
        for column in random.choice(num_metrics, min(num_metrics, random.integers(1, 4)), False):
            size = random.choice([-1, 1]) * random.lognormal(np.log(0.16), 0.5)
            values[machine, column, when] += np.float32(size)


def offset(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Healthy machines that are slightly slower, hotter or busier than the others all the time."""
    num_machines, num_metrics, _ = values.shape
    often = settings.disturbances * settings.offsets
    for _ in range(random.poisson(often * (0.4 + num_machines / 300))):
        machine = random.integers(num_machines)
        for column in random.choice(num_metrics, min(num_metrics, random.integers(1, 4)), False):
            size = random.choice([-1, 1]) * random.lognormal(np.log(MEDIAN_OFFSET), 0.4)
            values[machine, column] += np.float32(size)


def drift(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Machines of which one metric moves away steadily, by up to `MAX_DRIFT` in 15 minutes."""
    num_machines, num_metrics, seconds = values.shape
    ramp = np.arange(seconds, dtype=np.float32) / 900
    for machine in np.flatnonzero(random.random(num_machines) < settings.drifts):
        column = int(random.integers(num_metrics))
        share = random.choice([-1, 1]) * random.uniform(0, MAX_DRIFT)
        size = share * METRICS[settings.metrics[column]].level
        values[machine, column] += np.float32(size) * ramp


def as_events(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Rates of events for shares of capacity: ``exp(EVENTS x)`` times a lognormal factor, scaled.

    What adds a share multiplies a rate, and most seconds are far below the mean.
    """
    factor = random.lognormal(0, EVENT_NOISE, values.shape).astype(np.float32)
    return (np.exp(EVENTS * np.clip(values, 0, 1.2)) * factor / np.exp(EVENTS)).astype(np.float32)
