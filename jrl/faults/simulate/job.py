"""Training job of a simulated fleet: its period, its pipelines, its checkpoints."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int

PIPELINES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Job:
    """A synchronous job in 3D parallelism, machine by machine.

    Attributes:
      pipeline: which data-parallel replica a machine belongs to; its stages wait for each other.
      stage: which pipeline stage it holds.
      computing: share of each second that a machine spends in the compute phase of its step.
      busy: share of each second that it is not held up by a checkpoint.
      load: how much work a step holds, relative to the mean; the same for all machines.
      writing: how much of each second goes into writing a checkpoint.
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
