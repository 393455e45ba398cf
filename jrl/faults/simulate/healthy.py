"""A fleet in health: what each metric of each machine reads while the job runs, and is disturbed.

Values are shares of a metric's capacity until `incident.simulate` turns them into its unit.
"""

import numpy as np
from jaxtyping import Float32

from jrl.faults.simulate.job import Job
from jrl.faults.simulate.metrics import METRICS, Metric
from jrl.faults.simulate.settings import Settings

DRIFT_SECONDS = 30
"""Between two knots of the wandering."""
LONGEST_STRAGGLER = 150
"""Seconds after which an innocent disturbance is over."""
LASTING = 0.08
"""Median size of a difference that is there all the time: a third of what a fault changes."""


def healthy(
    job: Job, settings: Settings, random: np.random.Generator
) -> Float32[np.ndarray, "machine metric time"]:
    """Metrics of all machines with noise, wandering, load shifts, checkpoints and stragglers."""
    shape = job.computing.shape
    values = np.empty((shape[0], len(settings.metrics), shape[1]), np.float32)
    for column, name in enumerate(settings.metrics):
        values[:, column] = _rhythm(job, METRICS[name]) + _noise(shape, METRICS[name], random)
    _straggle(values, settings, random)
    _differ(values, settings, random)
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
    noise += metric.spread * random.standard_normal((num_machines, 1), np.float32)
    noise += metric.drift * _wandering(num_machines, seconds, random)
    if metric.bursts:
        count = random.poisson(metric.bursts * noise.size)
        places = random.integers(noise.size, size=count)
        sizes = random.exponential(0.15, count) * random.choice([-1, 1], count)
        noise.flat[places] += sizes.astype(np.float32)
    return noise


def _wandering(num_machines: int, seconds: int, random: np.random.Generator) -> np.ndarray:
    """Independent knots, joined by straight lines."""
    knots = random.standard_normal((num_machines, seconds // DRIFT_SECONDS + 2), np.float32)
    time = np.arange(seconds, dtype=np.float32) / DRIFT_SECONDS
    left = time.astype(int)
    right = time - left
    return knots[:, left] * (1 - right) + knots[:, left + 1] * right


def _straggle(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Machines that lag for a while and recover, with metrics and sizes like those of a fault."""
    num_machines, num_metrics, seconds = values.shape
    rate = settings.disturbances * seconds / 900 * (0.6 + num_machines / 300)
    for _ in range(random.poisson(rate)):
        machine = random.integers(num_machines)
        length = int(np.clip(random.exponential(40), 5, LONGEST_STRAGGLER))
        begin = random.integers(-length + 1, seconds)
        when = slice(max(0, begin), begin + length)
        for column in random.choice(num_metrics, min(num_metrics, random.integers(1, 4)), False):
            size = random.choice([-1, 1]) * random.lognormal(np.log(0.16), 0.5)
            values[machine, column, when] += np.float32(size)


def _differ(values: np.ndarray, settings: Settings, random: np.random.Generator) -> None:
    """Machines that are a bit slower, hotter or busier than the others all the time, and sound."""
    num_machines, num_metrics, _ = values.shape
    for _ in range(random.poisson(settings.disturbances * (0.4 + num_machines / 300))):
        machine = random.integers(num_machines)
        for column in random.choice(num_metrics, min(num_metrics, random.integers(1, 4)), False):
            size = random.choice([-1, 1]) * random.lognormal(np.log(LASTING), 0.4)
            values[machine, column] += np.float32(size)
