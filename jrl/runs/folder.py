"""Run folder: the paths of its files, and the lock of the process that writes it.

``runs/<name>/  config.json  run.yaml  tokenizer.model  metrics.jsonl  samples.jsonl  plots/
checkpoints/`` (elsewhere with ``--checkpoint-dir``), ``report.html``, ``versions.json`` with the
versions of its software, ``recipe.py`` for a custom recipe, ``code/`` with the files of custom
tasks and rewards, and for a run that starts from a public checkpoint ``model.json`` and
``origin/``.

The process that writes a run holds a lock on it, which the kernel releases when the process ends in
any way. A run exists from its ``config.json`` on, which `create` writes last.
"""

import fcntl
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.processes.agreement import installed_versions
from jrl.runs import records
from jrl.runs.directory import OBJECT_STORAGE, StoragePath, open_directory, storage_path
from jrl.runs.storage import writing

LOCK = ".lock"
RUNS_PATH = Path("runs")
"""Default folder of runs, below the working directory."""


def local_path(path: Path | str) -> Path:
    """The path of a run folder; ValueError for an address in object storage, which would otherwise
    become a local folder of that name."""
    if OBJECT_STORAGE.fullmatch(str(path)):
        raise ValueError(
            f"run folder {path} is an address in object storage: give a path of a file system, for "
            "several machines of one that all of them share (NFS, Lustre). Checkpoints may be in "
            "a bucket: --checkpoint-dir gs://BUCKET/PATH."
        )
    return Path(os.path.expanduser(path))


def next_run_path(recipe: str, task: str) -> Path:
    """Folder of the next run of a recipe on a task, numbered one above the highest that exists."""
    task_kind, _, task_file = task.partition(":")
    words = [recipe, Path(task_kind).stem, *([Path(task_file).stem] if task_file else [])]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())
    matches = [re.fullmatch(rf"{name}-(\d+)", path.name) for path in RUNS_PATH.glob(f"{name}-*")]
    run_id = 1 + max((int(match[1]) for match in matches if match), default=0)
    return RUNS_PATH / f"{name}-{run_id}"


class RunFolder:
    """The files of one run.

    `create` starts a run and `resume` continues one; both hold the lock until `close`. `read` opens
    a run that another process may be writing.
    """

    def __init__(self, path: Path | str):
        self.path = local_path(path)
        self.config_path = self.path / "config.json"
        self.tokenizer_path = self.path / "tokenizer.model"
        self.model_path = self.path / "model.json"
        self.origin_path = self.path / "origin"
        self.settings_path = self.path / "run.yaml"
        self.recipe_path = self.path / "recipe.py"
        self.code_path = self.path / "code"
        self.metrics_path = self.path / "metrics.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.stopped_path = self.path / "stopped.json"
        self.plots_path = self.path / "plots"
        self.report_path = self.path / "report.html"
        self.versions_path = self.path / "versions.json"
        self.adapters_path = self.path / "adapters"
        self.stacks_path = self.path / "stacks"
        self.tensorboard_path = self.path / "tensorboard"
        self.profiles_path = self.path / "profiles"
        self._checkpoints_path: StoragePath | None = None
        self._lock: int | None = None

    @property
    def checkpoints_path(self) -> StoragePath:
        """Directory of the checkpoints: the configuration's ``checkpoint_dir``, or one in the
        folder."""
        if self._checkpoints_path is None:
            config = self.config() if self.config_path.is_file() else {}
            self.set_checkpoint_dir(config.get("run", {}).get("checkpoint_dir"))
        assert self._checkpoints_path is not None
        return self._checkpoints_path

    def set_checkpoint_dir(self, directory: str | None) -> None:
        """Sets the directory of the checkpoints; None is one in the folder."""
        local = self.path / "checkpoints"
        self._checkpoints_path = local if directory is None else storage_path(directory)

    @classmethod
    def create(
        cls,
        path: Path | str,
        config: Mapping[str, Any],
        recipe: bytes | None = None,
        code: Mapping[str, bytes] | None = None,
    ) -> "RunFolder":
        """Begin a run in a folder that is empty or does not exist.

        Args:
          path: the folder; its parents are created.
          config: everything needed to repeat the run, as JSON values.
          recipe: file of a custom recipe; None for a built-in one.
          code: files of custom tasks and rewards, by their names in `code_path`; None for none.

        Raises:
          ValueError: if a run or other files exist there, or checkpoints in its
            ``checkpoint_dir``, if another process is writing there, or if JSON cannot represent
            the configuration.
          StorageError: if ``checkpoint_dir`` is not writable.
        """
        reference = str(config.get("recipe"))
        if recipe is None and reference.startswith("recipe.py:"):
            raise ValueError(
                f"the run would lack the file of its recipe {reference}: give "
                "recipe=jrl.recipes.load.source_of(recipe)."
            )
        content = _config_bytes(config)
        folder, code = cls(path), {} if code is None else code
        folder.set_checkpoint_dir(config.get("run", {}).get("checkpoint_dir"))
        folder._reject_occupied(recipe, code)
        folder._claim_checkpoints(content)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder._acquire()
        try:
            folder._reject_occupied(recipe, code)  # another process may have come first
            if recipe is not None:
                records.replace(folder.recipe_path, recipe)
            if code:
                folder.code_path.mkdir(exist_ok=True)
            for name, source in code.items():
                records.replace(folder.code_path / name, source)
            records.replace(folder.config_path, content)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def resume(cls, path: Path | str) -> "RunFolder":
        """Continue a run.

        Raises:
          ValueError: if there is no run, or another process is writing it.
        """
        folder = cls.read(path)
        folder._acquire()
        return folder

    @classmethod
    def read(cls, path: Path | str) -> "RunFolder":
        """Open a run read-only.

        Raises:
          ValueError: if there is no run.
        """
        folder = cls(path)
        if not folder.config_path.is_file():
            raise ValueError(
                f"run folder {folder.path} holds no run (config.json is missing): "
                "give the folder of a run, such as runs/grpo-sort-1; without --resume a new one "
                "starts there"
            )
        folder._reject_links()
        return folder

    def config(self) -> dict[str, Any]:
        """Return the configuration the run was created with."""
        return records.read_object(self.config_path, "put the file back as it was")

    def change_config(self, config: Mapping[str, Any]) -> None:
        """Replace the configuration of a run that is being resumed."""
        records.replace(self.config_path, _config_bytes(config))

    def write_versions(self, device: str) -> None:
        """Write the versions of the software that makes the run, and the kind and number of its
        accelerators, each time it starts or resumes."""
        versions = {
            "python": platform.python_version(),
            **installed_versions(),
            "platform": platform.platform(terse=True),
            "devices": device,
        }
        records.replace(self.versions_path, (json.dumps(versions, indent=2) + "\n").encode())

    def versions(self) -> dict[str, str]:
        """Return the versions of a run; empty for runs from before they were recorded."""
        if not self.versions_path.exists():
            return {}
        versions = records.read_object(self.versions_path, "delete it, or put it back as it was")
        return {str(name): str(version) for name, version in versions.items()}

    def write_stopped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the evaluation of a run that a signal stopped at `step`. It is no line of the
        metrics, which are the same whether or when a run is stopped."""
        content = json.dumps({"step": step, **records.plain(metrics)}) + "\n"
        records.replace(self.stopped_path, content.encode())

    def metrics(self) -> list[dict[str, float | int]]:
        """Return the lines of the metrics, the last one with the evaluation of a stopped run; none
        for a run that has no step yet."""
        if not self.metrics_path.exists():
            return []
        lines = records.read_metrics(self.metrics_path)
        if lines and self.stopped_path.exists():
            (stopped,) = records.read_metrics(self.stopped_path)
            lines[-1] |= stopped if stopped["step"] == lines[-1]["step"] else {}
        return lines

    def line_offsets(self) -> dict[str, records.FileOffset]:
        """Return the offsets of the run's lines, for the checkpoint that continues after them."""
        paths = (self.metrics_path, self.samples_path)
        return {path.name: records.read_offset(path) for path in paths}

    def file_hashes(self) -> dict[str, records.FileOffset]:
        """Return the hashes of the files of the run that never change."""
        paths = [self.recipe_path, self.tokenizer_path, self.model_path]
        paths += sorted(self.code_path.glob("*.py"))
        return {path.relative_to(self.path).as_posix(): records.read_offset(path) for path in paths}

    def check_files(self, step: int, saved: Mapping[str, records.FileOffset]) -> None:
        """Reject files that differ from `saved`, the `file_hashes` at the checkpoint of `step`."""
        self.check_same_files(step, self.file_hashes(), saved)

    def check_same_files(
        self,
        step: int,
        current: Mapping[str, records.FileOffset],
        saved: Mapping[str, records.FileOffset],
    ) -> None:
        """Reject files whose `current` hashes differ from those `saved` at the checkpoint of
        `step`."""
        for name, hashes in current.items():
            if name in saved and hashes != saved[name]:
                raise ValueError(
                    f"{self.path / name} is not what it was at the checkpoint of step {step}: it "
                    "was changed, or is that of another run; put the file back as it was"
                )

    def rewind(self, step: int, saved: Mapping[str, records.FileOffset]) -> None:
        """Drop the metrics and samples after `saved`, the `line_offsets` at the checkpoint of
        `step`, from which they are written again.

        Raises:
          ValueError: if the lines before them differ from those at the checkpoint.
        """
        records.truncate(self.metrics_path, saved["metrics.jsonl"], step, every_step=True)
        records.truncate(self.samples_path, saved["samples.jsonl"], step, every_step=False)
        self.stopped_path.unlink(missing_ok=True)

    def discard_unsaved(self) -> None:
        """Drop the lines of a run that was killed before its first checkpoint.

        Raises:
          ValueError: if there are metrics that only a run with checkpoints has.
        """
        lines = records.read(self.metrics_path) if self.metrics_path.exists() else []
        if lines and lines[-1]["step"] > 0:
            raise ValueError(
                f"{self.metrics_path} goes up to step {lines[-1]['step']} and there is no "
                f"checkpoint in {self.checkpoints_path}: restore the checkpoints, or start a new "
                "run in another folder"
            )
        self.metrics_path.unlink(missing_ok=True)
        self.samples_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the lock. Calling it again does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _reject_occupied(self, recipe: bytes | None, code: Mapping[str, bytes]) -> None:
        if self.config_path.exists():
            raise ValueError(
                f"run folder {self.path} already holds a run: "
                "continue it with --resume, or choose another --run-dir"
            )
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run folder {self.path} is a file: choose another --run-dir")
        # A kill before config.json is written leaves only these.
        names = self.config_path.name, self.recipe_path.name
        expected_names = {LOCK, *(name + ".tmp" for name in names)}
        # A recipe that equals the one to be written is ours; any other is the user's.
        if self.recipe_path.is_file() and self.recipe_path.read_bytes() == recipe:
            expected_names.add(self.recipe_path.name)
        if self.code_path.is_dir() and all(
            entry.name.removesuffix(".tmp") in code for entry in self.code_path.iterdir()
        ):
            expected_names.add(self.code_path.name)
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} - expected_names:
            raise ValueError(
                f"run folder {self.path} holds files but no run: choose another --run-dir"
            )

    def _claim_checkpoints(self, config: bytes) -> None:
        """Creates the checkpoint directory of a new run if it is outside of its folder."""
        if self.checkpoints_path == self.path / "checkpoints":
            return
        directory = open_directory(self.checkpoints_path)
        with writing(directory.path, "No run was started."):
            is_empty = directory.is_empty()
            if is_empty:
                directory.claim(config)
        if not is_empty:
            raise ValueError(
                f"{directory.path} holds checkpoints of another run: choose another "
                "--checkpoint-dir"
            )

    def _reject_links(self) -> None:
        """Rejects links to files outside of the folder, which would be read or overwritten. Only
        the checkpoints may be elsewhere, as the settings may say too."""
        folder = self.path.resolve()
        for path in (*self.path.iterdir(), *self.path.glob("*/*")):
            is_expected = path.relative_to(self.path).parts[0] in self._expected_names
            if not (is_expected and path.is_symlink()) or path.resolve().is_relative_to(folder):
                continue
            raise ValueError(
                f"{path} is a link to {path.resolve()}, outside of the run folder: replace the "
                "link by the file"
            )

    @property
    def _expected_names(self) -> set[str]:
        """Names in the folder that are read or written, except for the checkpoints."""
        paths = [path for path in vars(self).values() if isinstance(path, Path)]
        return {LOCK, "faults", *(path.name for path in paths)} - {"checkpoints"}

    def _acquire(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path / LOCK, flags, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise ValueError(
                f"run folder {self.path} is being written by another process (pid {holder}): "
                "wait for it, stop it, or choose another --run-dir"
            ) from None
        self._lock = lock
        with records.naming(self.path / LOCK):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)


def _config_bytes(config: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(config, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config cannot be written as JSON: {error}") from None
    return (text + "\n").encode()
