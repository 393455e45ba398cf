"""Loggers of metrics besides ``metrics.jsonl``: TensorBoard and Weights & Biases.

Both are extras, imported only when one of these classes is created; a ValueError says that one is
not installed.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jrl.checks import import_extra

FLUSH_SECONDS = 5


@runtime_checkable
class Logger(Protocol):
    """Interface of a destination of metrics, for the trainer."""

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Write out what is buffered. Nothing may be logged afterwards."""
        ...


class TensorBoard:
    """Scalars as TensorBoard events, written by a thread every few seconds.

    A kill can lose those seconds; ``metrics.jsonl`` is the complete record.

    Args:
      directory: of the event files; created if missing.
      resume_step: first step of a resumed run, inclusive. TensorBoard then hides later events of
        an earlier, killed process.
    """

    def __init__(self, directory: Path | str, resume_step: int | None = None):
        module = import_extra("tensorboardX", "tensorboard", "logging to tensorboard")
        purge = None if resume_step is None else resume_step + 1
        self._writer = module.SummaryWriter(
            logdir=str(directory), purge_step=purge, flush_secs=FLUSH_SECONDS
        )

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), global_step=step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Metrics as the history of a Weights & Biases run.

    A resumed run continues its own history, which cannot be truncated: steps that a killed process
    logged after its last checkpoint remain, and are not logged again. The same seed gives the same
    metrics, except for timings.

    Args:
      directory: the run folder, whose name is the name of the run; local files go to ``wandb/`` in
        it. ``wandb/run-id`` has the identity of the run, so that another run of the same name is
        never continued.
      config: shown with the run.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]):
        module = import_extra("wandb", "wandb", "logging to wandb")
        self._run = module.init(
            dir=str(directory),
            project="jrl",
            name=directory.name,
            id=_identity(directory / "wandb" / "run-id"),
            config=dict(config),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        if step < self._run.step:
            return
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


def _identity(path: Path) -> str:
    """The identity in the file; a new one if there is no file yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()


def check_installed(destination: str) -> None:
    """Raises ValueError unless the package behind "tensorboard" or "wandb" is installed."""
    module = {"tensorboard": "tensorboardX", "wandb": "wandb"}[destination]
    import_extra(module, destination, f"logging to {destination}")
