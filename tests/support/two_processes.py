"""One of the processes of a run, which trains and evaluates by the commands that a user types.

    python two_processes.py COUNT PORT NUMBER FOLDER FLAGS...

The two processes of COUNT 2 make the run FOLDER/two and stop on the way; the one of COUNT 1 makes
FOLDER/alone and goes on where the two had stopped. Status and standard error of each command go to
FOLDER/COUNT-NUMBER.json.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import command_runs  # noqa: F401, the micro model

from jrl import evaluate, train
from jrl.processes.agreement import any_of, is_main_process
from jrl.trainer import loop

train_step = loop.train_step


def interrupted(*arguments, **options):
    """A training step in which this process is asked to stop."""
    os.kill(os.getpid(), signal.SIGTERM)
    return train_step(*arguments, **options)


class Commands:
    """Runs commands as this process of several, and keeps what came of them."""

    def __init__(self, count: str, port: str, number: str, folder: Path):
        self.folder = folder
        self.who = [
            f"--coordinator=localhost:{port}",
            f"--num-processes={count}",
            f"--process-id={number}",
        ]
        self.results: dict[str, tuple[int, str]] = {}

    def __call__(self, name, command, *arguments):
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            status = command.main([*arguments, *self.who])
        self.results[name] = status, errors.getvalue()

    def resume(self, name, run, *arguments):
        self(name, train, "--resume", f"--run-dir={self.folder / run}", *arguments)

    def evaluate(self, name, number):
        out = self.folder / f"{name}-{number}.json"
        as_trained = ["--k=1", "--prompts=4", "--seed=3"]
        self(name, evaluate, str(self.folder / "two"), *as_trained, f"--json={out}")


def two(run: Commands, number: str, flags: list[str]) -> None:
    begin = [*flags, f"--run-dir={run.folder / 'two'}"]
    if number == "1":
        loop.train_step = interrupted
    run("stopped", train, *begin)
    loop.train_step = train_step
    if is_main_process():
        shutil.copytree(run.folder / "two", run.folder / "stopped")
    any_of(False)  # until it has been copied
    run.resume("resumed", "two", "--faults")
    run("occupied", train, *begin)
    run("different", train, *flags, f"--seed={number}")
    others = [flag for flag in flags if not flag.startswith("--layout=")]
    run("part", train, *others, "--layout=dp2")
    run.evaluate("evaluated by two", number)


def alone(run: Commands, flags: list[str]) -> None:
    run("alone", train, *flags, f"--run-dir={run.folder / 'alone'}")
    run.resume("went on", "stopped")
    run.evaluate("evaluated by one", "0")


def main(count: str, port: str, number: str, folder: str, *flags: str) -> None:
    run = Commands(count, port, number, Path(folder))
    if count == "2":
        two(run, number, list(flags))
    else:
        alone(run, list(flags))
    (run.folder / f"{count}-{number}.json").write_text(json.dumps(run.results))


if __name__ == "__main__":
    main(*sys.argv[1:])
