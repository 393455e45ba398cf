"""Noise in the metrics of healthy machines: wrong readings, bursts, slowdowns, constant offsets.

Noise that is normal and independent would be averaged away by anything. What is recorded once a
second in production is not like that:

* A counter is read late now and then: what one second lacks the next has too much (`read_late`).
* A lone reading is far off: activity is read while a GPU waits for its next kernel, or CPU usage
  while a process of the host wakes up (`misread`).
* Metrics burst for seconds, with sizes and lengths over orders of magnitude: pause frames where
  flows of a collective meet, CPU usage where logs are shipped or Python collects garbage, activity
  where a loader is late (`burst`). A burst is in one metric, or in one group.

The rates of all this differ more between fleets than within one (`_rate`): networks are tuned or
not, hosts shared or not. The kinds are well known; their rates and sizes are not published and are
our choices, see `docs/faults.md`.
"""

import numpy as np

from jrl.faults.simulate.metrics import METRICS
from jrl.faults.simulate.settings import Settings

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


def disturb(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Adds all of them to ``[machine, metric, time]`` shares of capacity, in place."""
    burst(values, settings, random)
    slow_transiently(values, settings, random)
    offset(values, settings, random)
    misread(values, settings, random)
    read_late(values, settings, random)
    if settings.drifts > 0:
        drift(values, settings, random)


def _rate(median: float, settings: Settings, random: np.random.Generator) -> float:
    """Rate of this fleet: one fleet in six has three times the median, one in six a third."""
    return settings.disturbances * median * random.lognormal(0, 1.1)


def _sample_events(
    rate: float, shape: tuple[int, int], random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Machines and seconds of events that come at `rate` per machine and second."""
    num_machines, seconds = shape
    count = random.poisson(rate * num_machines * seconds)
    return random.integers(num_machines, size=count), random.integers(seconds, size=count)


def read_late(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Moves half or more of a second into the next, in all counters of a machine simultaneously."""
    num_machines, _, seconds = values.shape
    machine, time = _sample_events(
        _rate(LATE_SHARE, settings, random), (num_machines, seconds - 1), random
    )
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
        machine, time = _sample_events(
            _rate(metric.spikes, settings, random), (num_machines, seconds), random
        )
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
        shape = (num_machines, seconds)
        events = _sample_events(_rate(rate, settings, random), shape, random)
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
        size = (
            random.choice([-1, 1])
            * random.uniform(0, MAX_DRIFT)
            * METRICS[settings.metrics[column]].level
        )
        values[machine, column] += np.float32(size) * ramp


def as_events(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Rates of events for shares of capacity: ``exp(EVENTS x)`` times a lognormal factor, scaled.

    What adds a share multiplies a rate, and most seconds lie far below the mean.
    """
    factor = random.lognormal(0, EVENT_NOISE, values.shape).astype(np.float32)
    return (np.exp(EVENTS * np.clip(values, 0, 1.2)) * factor / np.exp(EVENTS)).astype(np.float32)
