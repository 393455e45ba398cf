"""Runs in which a process is frozen, or a verifier does not answer."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from command_runs import IN_A_FRESH_PROCESS, metrics
from places import ROOT, SUPPORT

pytestmark = pytest.mark.slow
SETTINGS = {
    "model": "micro",
    "warm-start-steps": 0,
    "warm-start-batch": 4,
    "prompts": 4,
    "group-size": 2,
    "mini-batch": 8,
    "eval-prompts": 4,
    "eval-every": 1000,
    "checkpoint-every": 1000,
    "samples-every": 1000,
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}
ENDLESS = 100_000
"""Steps of a run that does not end by itself."""
WAIT = 600
"""Seconds for what takes far fewer."""
SLEEPER = """
import time

CALLS = []

def reward(prompt, completion, answer):
    CALLS.append(completion)
    if len(CALLS) > 40:
        time.sleep(3600)
    return float(len(completion))
"""


class Run:
    """The processes of a run, which are killed at the end of the block."""

    def __init__(self, folder, count, *flags):
        self.folder = folder
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        command = [sys.executable, "-c", IN_A_FRESH_PROCESS, *FLAGS, *flags]
        command += [f"--run-dir={folder}"]
        together = ["--layout=tp2 dp2 / ep4", "--devices=4", f"--coordinator=localhost:{port}"]
        self.processes = [
            subprocess.Popen(
                [*command, *together, f"--num-processes={count}", f"--process-id={number}"]
                if count > 1
                else command,
                env=ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()

    def after(self, steps):
        """Waits until so many steps have been written."""
        path, deadline = self.folder / "metrics.jsonl", time.monotonic() + WAIT
        while not path.exists() or len(path.read_text().splitlines()) <= steps:
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in self.processes)
            time.sleep(0.1)

    def end(self, process):
        """Status and lines on standard error of a process; its own lines only."""
        _, errors = self.processes[process].communicate(timeout=WAIT)
        lines = errors.splitlines()
        # Gloo, XLA and JAX print lines of their own.
        ours = [line for line in lines if line.startswith(("error:", "warning:", "process "))]
        return self.processes[process].returncode, ours


def stacks(run, process):
    return (run.folder / "stacks" / f"process-{process}.txt").read_text()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_is_named_and_ends_the_other(tmp_path, frozen):
    with Run(tmp_path / "run", 2, f"--steps={ENDLESS}", "--hang-deadline=12") as run:
        run.after(3)
        run.processes[frozen].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        status, lines = run.end(1 - frozen)
        seconds = time.monotonic() - begin
        run.processes[frozen].send_signal(signal.SIGCONT)
        assert run.end(frozen)[0] != 0
    # The last heartbeat was up to a second before, and reading it takes as long.
    assert status == 1 and 9 < seconds < 60
    name = f"process {frozen} (host {socket.gethostname()}) has sent no heartbeat for"
    assert [line.partition(name)[0] for line in lines] == ["warning: ", "error: "], lines
    assert "frozen, or the machine or the link is down; last in `" in lines[1]
    assert "MainThread" in stacks(run, 1 - frozen)
    assert "most recent call first" in stacks(run, 1 - frozen)


def test_a_process_that_comes_back_changes_nothing(tmp_path):
    ends = []
    for name in ("clean", "frozen"):
        with Run(tmp_path / name, 2, "--steps=12", "--hang-deadline=30") as run:
            run.after(3)
            if name == "frozen":
                run.processes[1].send_signal(signal.SIGSTOP)
                time.sleep(20)
                run.processes[1].send_signal(signal.SIGCONT)
            ends.append([run.end(number) for number in (0, 1)])
    assert ends[0] == [(0, []), (0, [])]  # a clean run says nothing
    assert not (tmp_path / "clean" / "stacks").exists()
    [(status, lines), other] = ends[1]
    assert (status, other) == (0, (0, []))
    assert [line.split(" ")[0] for line in lines] == ["warning:", "process"], lines
    assert lines[1].endswith("again made progress")
    assert metrics(tmp_path / "frozen") == metrics(tmp_path / "clean")
    assert len(metrics(tmp_path / "clean")) == 13


@pytest.mark.parametrize("count", [1, 2])
def test_a_verifier_that_does_not_answer_is_named(tmp_path, count):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    flags = [f"--reward={tmp_path / 'sleeper.py'}:reward", "--verifiers=1"]
    flags += ["--reward-seconds=3600", f"--steps={ENDLESS}", "--hang-deadline=10"]
    with Run(tmp_path / "run", count, *flags) as run:
        ends = [run.end(number) for number in range(count)]
    name = f"process 0 (host {socket.gethostname()}) has been in `reward` of step"
    assert [status for status, _ in ends] == [1] * count
    lines = ends[0][1]
    assert [line.partition(name)[0] for line in lines] == ["warning: ", "error: "], lines
    assert "s, waiting for verifiers or rewards" in lines[0]
    assert ("; the others wait in `agreement` (`rollout`)" in lines[0]) == (count == 2)
    # The other process says the same, or that the first has ended.
    assert [line.startswith("error: ") for _, other in ends[1:] for line in other] == [True] * (
        count - 1
    )
    assert "jrl verification" in stacks(run, 0)
