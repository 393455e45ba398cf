"""``python -m benchmarks.faults train``: the models of the package, trained on simulated fleets."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from benchmarks.faults.simulate import METRICS, PRODUCTION, Settings, simulate
from jrl.checks import check_seed
from jrl.command_line import parse_flags
from jrl.faults.collect.fleet import Fleet
from jrl.faults.minder import vae
from jrl.faults.minder.train import Training, fit, gather_windows, train_models, write_models


@dataclass(frozen=True)
class SimulatedTraining(Training):
    """Settings of the training, and simulated fleets, whose seeds follow from the same seed."""

    fleets: int = 24
    """Number of simulated fleets."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    training = parse_flags(SimulatedTraining, "python -m benchmarks.faults train", arguments)
    check_seed(training.seed)
    models, errors = train_models(healthy_fleets(training), training, show=Console().print)
    models[vae.JOINT] = train_joint(healthy_fleets(training, PRODUCTION), training)
    write_models(models, errors, training.out)
    return 0


def healthy_fleets(
    training: SimulatedTraining, metrics: Sequence[str] = tuple(METRICS)
) -> list[Fleet]:
    """Simulated fleets of 4 to 64 machines in which nothing fails."""
    random = np.random.default_rng(training.seed)
    return [
        simulate(
            Settings(machines=int(random.integers(4, 65)), metrics=tuple(metrics), faulty=False),
            seed=10_000_000 + training.seed * 1000 + index,
        ).fleet
        for index in range(training.fleets)
    ]


def train_joint(fleets: Sequence[Fleet], training: Training) -> vae.Weights:
    """One joint model for windows of all metrics: the paper's ablation "INT"."""
    random = np.random.default_rng(training.seed)
    windows = gather_windows(fleets, training.windows, random, same_positions=True)
    data = np.concatenate(list(windows.values()), axis=1)[None]
    weights, _ = fit(data, training)
    return {name: value[0] for name, value in weights.items()}
