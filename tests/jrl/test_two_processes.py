"""Two processes of two devices make the run that one process of four devices makes, to the bit.

The one process sums through Gloo too, for which it has a coordinator of its own: XLA's own sum over
more than two devices of a process adds up in another order.
"""

import json
import os
import socket
import subprocess
import sys

import pytest
from command_runs import metrics
from places import ROOT, SUPPORT

from jrl.runs.checkpoints import Checkpoints
from jrl.runs.records import read

# What one process does, over two; `trainer/test_processes.py` has their parts.
pytestmark = pytest.mark.slow
SETTINGS = {
    "model": "micro",
    "layout": "tp2 dp2 / ep4",
    "devices": 4,
    "steps": 3,
    "warm-start-steps": 0,
    "warm-start-batch": 4,
    "prompts": 4,
    "group-size": 2,
    "mini-batch": 8,
    "eval-prompts": 4,
    "eval-every": 1,
    "checkpoint-every": 2,
    "samples-every": 1,
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run of two processes, then of one, and the results of their commands."""
    folder = tmp_path_factory.mktemp("processes")
    for count in (2, 1):
        run_together(count, folder)
    return folder


def run_together(count, folder):
    """Runs `two_processes.py` in so many processes; their standard output goes to the folder."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    program = [sys.executable, str(SUPPORT / "two_processes.py"), str(count), port]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [*program, str(number), str(folder), *FLAGS],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        ends = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (process, (output, errors)) in enumerate(zip(processes, ends, strict=True)):
        assert process.returncode == 0, errors[-3000:]
        (folder / f"{count}-{number}.out").write_text(output)


def results(folder, name, count=2):
    """Status and standard error of a command in each of the processes."""
    files = [folder / f"{count}-{number}.json" for number in range(count)]
    return [json.loads(file.read_text())[name] for file in files]


def test_two_processes_make_the_curve_of_one(folder):
    assert results(folder, "resumed") == [[0, ""], [0, ""]]
    assert results(folder, "alone", count=1) == [[0, ""]]
    assert metrics(folder / "two") == metrics(folder / "alone")
    assert len(metrics(folder / "two")) == 1 + SETTINGS["steps"]
    assert read(folder / "two" / "samples.jsonl") == read(folder / "alone" / "samples.jsonl")
    assert Checkpoints(folder / "two" / "checkpoints").steps() == [2, 3]
    assert (folder / "two" / "plots" / "overview.png").exists()


def test_a_signal_to_one_stops_both_at_the_same_step(folder):
    line = "SIGTERM: finishing step 1 and saving it; Ctrl-C stops immediately\n"
    assert results(folder, "stopped") == [[0, ""], [0, line]]
    for number in (0, 1):
        said = (folder / f"2-{number}.out").read_text()
        assert ("stopped after step 1 of 3" in said) == (number == 0)


def test_one_goes_on_where_two_have_stopped(folder):
    assert results(folder, "went on", count=1) == [[0, ""]]
    assert metrics(folder / "stopped") == metrics(folder / "alone")


def test_two_evaluate_as_one(folder):
    assert results(folder, "evaluated by two") == [[0, ""], [0, ""]]
    assert results(folder, "evaluated by one", count=1) == [[0, ""]]
    found = [json.loads((folder / f"evaluated by {n}-0.json").read_text()) for n in ("two", "one")]
    assert found[0] == found[1] and found[0]["step"] == SETTINGS["steps"]
    assert not (folder / "evaluated by two-1.json").exists()


def test_the_first_speaks_and_each_is_watched(folder):
    output = (folder / "2-0.out").read_text()
    assert "completed step: 3/3" in output and "held-out accuracy, start -> step 3" in output
    assert "Gloo" not in output
    assert (folder / "2-1.out").read_text() == ""
    names = sorted(path.name for path in (folder / "two" / "faults").iterdir())
    assert len({name.rsplit("-", 1)[0] for name in names}) == 1, names
    assert [name.rsplit("-", 1)[1][0] for name in names] == ["0", "1"], names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("occupied", "run folder {folder}/two already holds a run: continue it with --resume"),
        ("part", "layout 'dp2' takes 2 devices, and the processes of the run have 4: each must"),
    ],
)
def test_what_the_first_refuses_ends_both(folder, name, message):
    found = results(folder, name)
    assert [status for status, _ in found] == [2, 2]
    for (_, errors), prefix in zip(found, ("", "process 0: "), strict=True):
        own = "" if name == "part" else prefix  # all see that for themselves
        assert errors.startswith("error: " + own + message.format(folder=folder)), errors
        assert errors.count("\n") == 1


def test_processes_with_other_flags_are_refused(folder):
    for status, errors in results(folder, "different"):
        assert status == 2
        assert "process 1 was started for another run than process 0: --seed is 1 there" in errors


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--coordinator=auto", "coordinator='auto' finds no cluster that JAX supports"),
        (
            "--coordinator=localhost:1 --num-processes=2 --process-id=2",
            "process_id=2 must lie in 0..1",
        ),
    ],
)
def test_bad_flags_are_one_line(flags, message):
    command = [sys.executable, "-m", "jrl.train", *flags.split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: " + message) and done.stderr.count("\n") == 1
