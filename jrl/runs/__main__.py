"""``python -m jrl.runs list|verify|prune RUN`` manages the checkpoints of a run."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import tyro

from jrl.command_line import exit_status, parse_flags, start_jax
from jrl.program import program
from jrl.runs import manifest, provenance
from jrl.runs.checkpoints import BASE, Checkpoints
from jrl.runs.directory import Directory, StoragePath, open_directory
from jrl.runs.folder import RunFolder


@dataclass(frozen=True)
class RunsOptions:
    """Arguments of ``python -m jrl.runs``."""

    command: tyro.conf.Positional[Literal["list", "verify", "prune"]]
    """list: step, size, date and state of each checkpoint. verify: read all files and compare their
    hashes, and compare settings, code, tokenizer, metrics and samples with those at the newest
    intact checkpoint; the exit status is 1 if one is damaged or was changed. prune: remove all
    checkpoints but the newest undamaged ones, of a run that no process is writing."""
    run: tyro.conf.Positional[str]
    """Run folder."""
    keep: int | None = None
    """Checkpoints that prune keeps, at least 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    request = parse_flags(
        RunsOptions,
        program("runs"),
        arguments,
        "Lists, verifies and prunes the checkpoints of a run.",
    )
    keep, prunes = request.keep, request.command == "prune"
    if keep is not None and not prunes:
        raise ValueError(f"keep={keep} is for prune only: leave out --keep")
    if prunes and (keep is None or keep < 1):
        raise ValueError(f"keep={keep} must be at least 1: give prune --keep N")
    start_jax(1)  # of the host: the accelerators may be in use by the run
    if keep is not None:
        with RunFolder.resume(request.run) as folder:
            return prune(folder, keep)
    folder = RunFolder.read(request.run)
    return list_checkpoints(folder) if request.command == "list" else verify(folder)


def list_checkpoints(folder: RunFolder) -> int:
    """Prints step, size, date and state of each checkpoint; only sizes of files are compared."""
    directory = open_directory(folder.checkpoints_path)
    print(f"{'checkpoint':>12} {'size':>12}  {'written':19}  state")
    for label, path, step in _stored(folder):
        reason = manifest.find_incomplete(path, step)
        state = "complete, hashes not read" if reason is None else f"damaged: {reason}"
        print(_row(directory, label, path, state))
    others = dict.fromkeys(directory.incomplete(), "in flight, or left by a killed run")
    others |= {path: f"set aside as damaged ({path.name})" for path in directory.damaged()}
    for path, state in sorted(others.items()):
        print(_row(directory, f"step {path.name.partition('.')[0]}", path, state))
    return 0


def verify(folder: RunFolder) -> int:
    """Compares the hashes of all files, prints a line for each checkpoint and each file of the run,
    and returns 1 if one is damaged or was changed. No code of the run is loaded."""
    status, newest = 0, None
    for label, path, step in _stored(folder):
        reason = manifest.find_damage(path, step)
        if reason is not None and not path.is_dir():
            continue  # removed meanwhile by a run in progress
        status |= reason is not None
        print(f"{label}: {'intact' if reason is None else f'damaged: {reason}'}", flush=True)
        if reason is None and path.name == str(step) and path.parent.name != BASE:
            newest = step
    if newest is not None:
        saved = Checkpoints(folder.checkpoints_path).meta(newest)
        for name, reason in provenance.compare(folder, saved):
            status |= reason is not None
            state = "as" if reason is None else f"{reason}, unlike"
            print(f"{name}: {state} at the checkpoint of step {newest}", flush=True)
    return int(status)


def prune(folder: RunFolder, keep: int) -> int:
    """Removes all checkpoints but the newest `keep` with correct hashes; if all are damaged, raises
    ValueError and removes nothing."""
    directory = open_directory(folder.checkpoints_path)
    checkpoints = Checkpoints(folder.checkpoints_path)
    steps, intact, damaged = checkpoints.steps(), list[int](), dict[int, str]()
    for step in reversed(steps):
        if len(intact) == keep:
            break
        reason = manifest.find_damage(folder.checkpoints_path / str(step), step)
        if reason is None:
            intact.append(step)
        else:
            damaged[step] = reason
    if not intact:
        raise ValueError(
            f"no checkpoint in {folder.checkpoints_path} is intact, and nothing was removed: "
            "restore a copy of one"
        )
    for step in steps:
        if step in intact:
            print(f"step {step}: kept")
            continue
        why = f", damaged: {damaged[step]}" if step in damaged else ""
        size = _size(directory, folder.checkpoints_path / str(step))
        checkpoints.drop([step])
        print(f"step {step}: removed ({size}{why})")
    return 0


def _stored(folder: RunFolder) -> Iterator[tuple[str, StoragePath, int]]:
    """Label, folder and step of each checkpoint, and of the base weights of a run with adapters;
    ValueError if the run has none."""
    path = folder.checkpoints_path
    steps = Checkpoints(path).steps()
    if not steps:
        raise ValueError(f"no checkpoint in {path} yet: the first is written before the first step")
    if (path / BASE / "0").is_dir():
        yield "base weights", path / BASE / "0", 0
    yield from ((f"step {step}", path / str(step), step) for step in steps)


def _row(directory: Directory, label: str, path: StoragePath, state: str) -> str:
    _, seconds = directory.size_and_time(path)
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{label:>12} {_size(directory, path):>12}  {written}  {state}"


def _size(directory: Directory, path: StoragePath) -> str:
    return f"{directory.size_and_time(path)[0] / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
