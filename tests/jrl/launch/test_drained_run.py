"""A run on four hosts, one of which becomes faulty: it is drained, and the others finish."""

import os
import threading
import time

import pytest
from command_runs import metrics

from jrl.faults.collect.fleet import Fleet
from jrl.faults.drain import read_drains
from jrl.launch import __main__ as command
from jrl.launch import ssh_hosts

SETTINGS = {
    "model": "micro",
    "layout": "dp4",
    "devices": 4,
    "steps": 400,
    "warm-start-steps": 0,
    "warm-start-batch": 4,
    "prompts": 6,
    "group-size": 2,
    "mini-batch": 12,
    "eval-prompts": 4,
    "eval-every": 1000,
    "checkpoint-every": 1000,
    "samples-every": 1000,
    "run-dir": "run",
    "faults-continuity": 10,
    "on-fault": "drain",
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]
# Four processes on a few cores: each computes on one. All are on this machine.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
HOSTS = ("localhost", "node1", "node2", "node3")
SICK = "node2"
CLEAN_STEPS = 180
"""Steps of half a second before the fault: after 80 seconds an alarm could come."""
WAIT = 900
"""Seconds for what takes a few dozen."""


def count_steps(run):
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


@pytest.mark.slow
def test_the_others_finish_the_run_without_a_faulty_host(
    ssh, monkeypatch, tmp_path, free_port, capfd
):
    monkeypatch.setattr(ssh_hosts, "MODULE", "drained_training")
    drains_before = []

    def make_faulty():
        deadline = time.monotonic() + WAIT
        while count_steps(tmp_path / "run") < CLEAN_STEPS and time.monotonic() < deadline:
            time.sleep(0.2)
        drains_before.extend(read_drains(tmp_path / "run"))
        (tmp_path / "sick").touch()

    threading.Thread(target=make_faulty, daemon=True).start()
    options = [f"--hosts={','.join(HOSTS)}", "--elastic=2", f"--port={free_port}"]
    environment = [f"--env=XLA_FLAGS={os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"]
    status = command.main([*options, *environment, "--", *FLAGS, "--faults"])
    captured = capfd.readouterr()
    assert status == 0, captured.err[-3000:]
    assert drains_before == [], drains_before  # the clean run was not touched
    [drain] = read_drains(tmp_path / "run")
    others = [name for name in HOSTS if name != SICK]
    assert HOSTS[drain.process] == SICK and drain.restart.processes == (0, 1, 3)
    assert CLEAN_STEPS < drain.step < SETTINGS["steps"]
    fleet = Fleet.load(tmp_path / "run" / "faults" / "drain-1.npz")
    assert len(fleet.machines) == len(HOSTS) and drain.alarm["machine"] in fleet.machines
    continues = f"{SICK} is drained: the run continues after step {drain.step} on "
    assert f"{continues}{', '.join(others)} with layout" in captured.out
    assert f"drained {drain.alarm['machine']} after step {drain.step}" in captured.out
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(SETTINGS["steps"] + 1))
