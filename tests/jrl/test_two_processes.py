"""Two processes of two devices make the run that one process of four devices makes, to the bit.

Sums over devices have two terms on this layout, or are of whole numbers, so that the order in which
Gloo and XLA add up does not show.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import metrics

from jrl import evaluate, train
from jrl.trainer.checkpoints import Checkpoints
from jrl.trainer.records import read

HERE = Path(__file__).parent
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
AS_TRAINED = ["--k=1", "--prompts=4", "--seed=3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of one process, and what two made of theirs and of a copy of it."""
    folder = tmp_path_factory.mktemp("processes")
    assert train.main([*FLAGS, f"--run-dir={folder / 'alone'}"]) == 0
    shutil.copytree(folder / "alone", folder / "raised")
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "two_processes.py"), port, number, str(folder), *FLAGS],
            env={
                **os.environ,
                "PYTHONPATH": str(HERE.parents[1]),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    try:
        ends = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors), number in zip(processes, ends, "01", strict=True):
        assert process.returncode == 0, errors[-3000:]
        (folder / f"{number}.out").write_text(output)
    return folder


def results(folder, name):
    """Status and standard error of a command in each of the processes."""
    return [json.loads((folder / f"{number}.json").read_text())[name] for number in "01"]


def test_a_signal_to_one_stops_both_at_the_same_step(folder):
    for status, errors in results(folder, "stopped"):
        assert (status, errors) == (0, "")
    assert Checkpoints(folder / "stopped" / "checkpoints").steps() == [0, 1]
    assert metrics(folder / "stopped") == metrics(folder / "alone")[:2]


def test_two_processes_make_the_curve_of_one(folder):
    assert [status for status, _ in results(folder, "resumed")] == [0, 0]
    assert metrics(folder / "two") == metrics(folder / "alone")
    assert read(folder / "two" / "samples.jsonl") == read(folder / "alone" / "samples.jsonl")
    assert Checkpoints(folder / "two" / "checkpoints").steps() == [2, 3]
    assert (folder / "two" / "plots" / "overview.png").exists()


def test_one_goes_on_with_the_run_of_two(folder):
    assert train.main(["--resume", f"--run-dir={folder / 'stopped'}"]) == 0
    assert metrics(folder / "stopped") == metrics(folder / "alone")


def test_two_go_on_with_the_run_of_one(folder, tmp_path):
    assert [status for status, _ in results(folder, "raised")] == [0, 0]
    again = shutil.copytree(folder / "alone", tmp_path / "again")
    assert train.main(["--resume", f"--run-dir={again}", "--steps=4"]) == 0
    assert len(metrics(again)) == 5
    assert metrics(folder / "raised") == metrics(again)


def test_two_evaluate_as_one(folder, tmp_path):
    out = tmp_path / "out.json"
    assert evaluate.main([str(folder / "alone"), *AS_TRAINED, f"--json={out}"]) == 0
    assert json.loads((folder / "evaluated-0.json").read_text()) == json.loads(out.read_text())
    assert not (folder / "evaluated-1.json").exists()


def test_the_first_speaks_and_each_is_watched(folder):
    output = (folder / "0.out").read_text()
    assert "stopped after step 1 of 3" in output and "completed step: 3/3" in output
    assert "held-out accuracy, start -> step 3" in output and "Gloo" not in output
    assert (folder / "1.out").read_text() == ""
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
        ("--coordinator=auto", "coordinator='auto' finds no cluster that JAX knows"),
        (
            "--coordinator=localhost:1 --num-processes=2 --process-id=2",
            "process_id=2 must lie in 0..1",
        ),
    ],
)
def test_bad_flags_are_one_line(flags, message):
    command = [sys.executable, "-m", "jrl.train", *flags.split()]
    done = subprocess.run(
        command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: " + message) and done.stderr.count("\n") == 1
