"""Loggers of metrics besides ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio and MLflow.

Each is an extra, imported only when its class is created; a ValueError says that it is not
installed. `open_logger` makes one by its name, whose failures never end a run.
"""

import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jrl.checks import import_extra
from jrl.runs.folder import RunFolder
from jrl.runs.settings import LoggerName

FLUSH_SECONDS = 5
PROJECT = "jrl"
"""Project, or experiment, of all runs in a tracker."""
PAUSE_SECONDS = 60.0
"""Seconds from the failure of a logger until its next attempt; doubled by each further failure."""
MLFLOW_BATCH = 100
"""Parameters of one request, by MLflow's REST API."""
MLFLOW_VALUE = 500
"""Characters of a parameter, by the smallest limit of MLflow's stores."""
MLFLOW_IMPATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Environment of MLflow unless it is set: its own defaults would block a step for minutes."""


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
            project=PROJECT,
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


class Trackio:
    """Metrics as a trackio run, in trackio's local database or in the Space or server that its
    environment variables name.

    A resumed run continues its own history; steps that it repeats are not logged again.

    Args:
      directory: the run folder. ``trackio/run-id`` has the identity of the run, so that another run
        of the same name is never continued.
      config: shown with the run.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]):
        module = import_extra("trackio", "trackio", "logging to trackio")
        self._last = _LastStep(directory / "trackio")
        identity = _identity(directory / "trackio" / "run-id")
        self._run = module.init(
            project=PROJECT,
            name=f"{directory.name}-{identity}",
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        if self._last.reaches(step):
            return
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)
        self._last.write(step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Metrics as an MLflow run, in the store of MLFLOW_TRACKING_URI.

    A resumed run continues its own history; steps that it repeats are not logged again.

    Args:
      directory: the run folder, whose name is the name of the run. ``mlflow/run-id`` has the
        identity of the run.
      config: parameters of the run.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]):
        for name, value in MLFLOW_IMPATIENCE.items():
            os.environ.setdefault(name, value)
        module = import_extra("mlflow", "mlflow", "logging to mlflow")
        self._entities = module.entities
        self._client = module.MlflowClient()
        self._last = _LastStep(directory / "mlflow")
        path = directory / "mlflow" / "run-id"
        if path.exists():
            self._id = path.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = (
            self._client.create_experiment(PROJECT)
            if experiment is None
            else experiment.experiment_id
        )
        self._id = self._client.create_run(experiment_id, run_name=directory.name).info.run_id
        path.write_text(self._id + "\n")  # before its parameters, so that a failure makes no second
        params = [
            self._entities.Param(_mlflow_name(name), str(value)[:MLFLOW_VALUE])
            for name, value in _leaves(config)
        ]
        for start in range(0, len(params), MLFLOW_BATCH):
            self._client.log_batch(self._id, params=params[start : start + MLFLOW_BATCH])

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        if self._last.reaches(step):
            return
        now = int(1000 * time.time())
        values = [
            self._entities.Metric(_mlflow_name(name), float(value), now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=values)
        self._last.write(step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Patient:
    """Logger that survives failures of another one, such as a network that is down.

    The first failure prints a line. Metrics are kept, and sent by the first attempt that succeeds;
    attempts are made with pauses, so that a failing tracker does not slow down the run.

    Args:
      name: in the line.
      make: makes the other logger, also again after it failed.
      clock: seconds, for the pauses.
    """

    def __init__(
        self, name: str, make: Callable[[], Logger], clock: Callable[[], float] = time.monotonic
    ):
        self._name, self._make, self._clock = name, make, clock
        self._logger: Logger | None = None
        self._waiting = deque[tuple[int, dict[str, float | int]]]()
        self._pause, self._retry_at = PAUSE_SECONDS, -float("inf")
        self._has_failed = False
        self._send()

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._waiting.append((step, dict(metrics)))
        if self._clock() >= self._retry_at:
            self._send()

    def close(self) -> None:
        if self._waiting:
            self._send()
        try:
            if self._logger is not None:
                self._logger.close()
        except Exception as error:
            self._fail(error)
        if self._waiting:
            steps = f"{self._waiting[0][0]} to {self._waiting[-1][0]}"
            _print_line(f"warning: {self._name} lacks steps {steps}, which metrics.jsonl has")

    def _send(self) -> None:
        try:
            if self._logger is None:
                self._logger = self._make()
            while self._waiting:
                self._logger.log(*self._waiting[0])
                self._waiting.popleft()
        except Exception as error:  # libraries of trackers share no class of errors
            self._retry_at = self._clock() + self._pause
            self._pause *= 2
            self._fail(error)
        else:
            self._pause = PAUSE_SECONDS

    def _fail(self, error: Exception) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _print_line(f"warning: logging to {self._name} failed: {reason}; the run goes on")


def open_logger(name: LoggerName, folder: RunFolder, step: int) -> Logger:
    """Logger of a run that continues after `step`, by its name."""

    def make() -> Logger:
        if name == "tensorboard":
            # TensorBoard hides what a killed process logged after `step`.
            resumed = folder.tensorboard_path.is_dir()
            return TensorBoard(folder.tensorboard_path, step if resumed else None)
        kinds = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}
        return kinds[name](folder.path, folder.config())

    return Patient(name, make)


def check_installed(name: LoggerName) -> None:
    """Raises ValueError unless the package of a logger is installed."""
    module = "tensorboardX" if name == "tensorboard" else name
    import_extra(module, name, f"logging to {name}")


class _LastStep:
    """Last step that a tracker received, in a file of the run."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "last-step"
        content = self._path.read_text().strip() if self._path.exists() else ""
        self._step = int(content) if content.isdecimal() else -1

    def reaches(self, step: int) -> bool:
        return step <= self._step

    def write(self, step: int) -> None:
        self._step = step
        self._path.write_text(f"{step}\n")


def _identity(path: Path) -> str:
    """The identity in the file; a new one if there is no file yet."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8) + "\n")
    return path.read_text().strip()


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested settings, by names such as ``run.steps``."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _mlflow_name(name: str) -> str:
    """Name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
