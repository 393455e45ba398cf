"""Healthy fleet: the readings of each metric of each machine during a job, with disturbances.

Values are shares of a metric's capacity until `incident.simulate` turns them into its unit.
"""

import numpy as np
from jaxtyping import Float32

from jrl.faults.simulate.job import Job
from jrl.faults.simulate.metrics import METRICS, Metric
from jrl.faults.simulate.noise import disturb
from jrl.faults.simulate.settings import Settings

DRIFT_SECONDS = 30
"""Between two knots of the wandering."""
UNEVEN = 0.25
"""Deviation of the logarithm of how noisy a machine is."""


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
