"""Where metrics may go besides ``metrics.jsonl``: TensorBoard and Weights & Biases.

Both are extras, imported when one of these classes is made and not before.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

FLUSH_SECONDS = 5


@runtime_checkable
class Logger(Protocol):
    """What the trainer asks of a destination."""

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Write out what is buffered. Nothing may be logged afterwards."""
        ...


class TensorBoard:
    """Scalars as TensorBoard events, written by a thread every few seconds.

    A kill can lose those seconds: ``metrics.jsonl`` is the record, this is a view of it.

    Args:
      directory: where the event files go; made if missing.
      resume_step: the step a resumed run starts from. TensorBoard then hides what an earlier,
        killed process had written after it.

    Raises:
      ValueError: where tensorboardX is not installed.
    """

    def __init__(self, directory: Path | str, resume_step: int | None = None):
        module = _import("tensorboardX", extra="tensorboard")
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

    Args:
      directory: the run folder; local files go to ``wandb/`` in it.
      project: the project it belongs to.
      name: the run's name and identity: resuming under the same name continues its history.
      config: shown beside the run.
      mode: "online", "offline" or "disabled"; None leaves it to wandb's own settings.

    Raises:
      ValueError: where wandb is not installed.
    """

    def __init__(
        self,
        directory: Path | str,
        project: str,
        name: str,
        config: Mapping[str, Any],
        mode: str | None = None,
    ):
        module = _import("wandb", extra="wandb")
        self._run = module.init(
            dir=str(directory),
            project=project,
            name=name,
            id=name,
            config=dict(config),
            mode=mode,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


def check_installed(destination: str) -> None:
    """Raises ValueError unless the package behind "tensorboard" or "wandb" is installed."""
    _import({"tensorboard": "tensorboardX", "wandb": "wandb"}[destination], extra=destination)


def _import(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the package is there, and something it needs is not
            raise
        raise ValueError(
            f'logging to {extra} needs the package {name}: pip install -e ".[{extra}]"'
        ) from None
