"""Attention in one process and experts in another sample, in a run, what one process samples."""

import os
import socket
import subprocess
import sys

import pytest
from command_runs import IN_A_FRESH_PROCESS, metrics
from places import ROOT, SUPPORT

from jrl.train import main

pytestmark = pytest.mark.slow
SETTINGS = {
    "model": "micro",
    "layout": "dp2",
    "devices": 2,
    "steps": 2,
    "warm-start-steps": 0,
    "prompts": 3,
    "group-size": 2,
    "mini-batch": 6,
    "slots": 4,
    "eval-prompts": 2,
    "samples-every": 1,
    "router-replay": "R3",
    "rollout-engine": "disaggregated",
    "rollout-split": "dp1 / ep1",
}
"""Fewer slots than rows: rows come where others end. Two devices, whose sums have one order."""
MOVING = {
    "layout": "dp4",
    "devices": 4,
    "steps": 1,
    "prompts": 4,
    "mini-batch": 8,
    "rollout-split": "dp2 / ep2",
    "rollout-expert-slots": 5,
    "rollout-replan": 3,
}
"""Experts change places, and what is learned afterwards is a sum in another order."""


@pytest.mark.parametrize(
    ("changes", "count"), [({}, 2), (MOVING, 4)], ids=["fixed in two", "moving in four"]
)
def test_processes_sample_what_one_does(tmp_path, changes, count):
    flags = ["grpo", *(f"--{name}={value}" for name, value in (SETTINGS | changes).items())]
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    together = [f"--coordinator=localhost:{port}", f"--num-processes={count}"]
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, *flags, *together]
    processes = [
        subprocess.Popen(
            [*command, f"--process-id={number}", f"--run-dir={tmp_path / 'together'}"],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        assert main([*flags, f"--run-dir={tmp_path / 'one'}"]) == 0
        ends = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, errors in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors[-3000:]
    names = "one", "together"
    one, together = ((tmp_path / name / "samples.jsonl").read_bytes() for name in names)
    assert one == together
    if not changes:
        assert metrics(tmp_path / "one") == metrics(tmp_path / "together")
