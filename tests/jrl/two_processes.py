"""One of two processes that train and evaluate together, by the commands that a user types.

    python two_processes.py PORT NUMBER FOLDER

FOLDER holds the run `alone` of one process. What came of each command goes to FOLDER/NUMBER.json.
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
from jrl.trainer import loop
from jrl.trainer.processes import any_of, is_first

train_step = loop.train_step


def interrupted(setup, state):
    """A training step in which this process is asked to stop."""
    os.kill(os.getpid(), signal.SIGTERM)
    return train_step(setup, state)


def main(port: str, number: int, folder: Path, flags: list[str]) -> None:
    results = {}
    who = [f"--coordinator=localhost:{port}", "--num-processes=2", f"--process-id={number}"]

    def run(name, command, *arguments):
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            status = command.main([*arguments, *who])
        results[name] = [status, errors.getvalue()]

    def resume(name, run_dir, *arguments):
        run(name, train, "--resume", f"--run-dir={folder / run_dir}", *arguments)

    begin = [*flags, f"--run-dir={folder / 'two'}"]
    if number == 1:
        loop.train_step = interrupted
    run("stopped", train, *begin)
    loop.train_step = train_step
    if is_first():
        shutil.copytree(folder / "two", folder / "stopped")
    any_of(False)  # until it has been copied
    resume("resumed", "two", "--faults")
    resume("raised", "raised", "--steps=4")
    run("occupied", train, *begin)
    run("different", train, *flags, f"--seed={number}")
    run("part", train, *flags, "--layout=dp2")
    out = folder / f"evaluated-{number}.json"
    as_trained = ["--k=1", f"--prompts={EVALUATED}", "--seed=3"]
    run("evaluated", evaluate, str(folder / "alone"), *as_trained, f"--json={out}")
    (folder / f"{number}.json").write_text(json.dumps(results))


EVALUATED = 4

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
