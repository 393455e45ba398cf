"""A run on four hosts, one of which becomes slow: it is drained, and the others finish."""

import contextlib
import os
import signal
import threading
import time

import pytest
from command_runs import metrics

from jrl.faults.collect.record import read_folder
from jrl.faults.collect.vocabulary import SLOWDOWN
from jrl.faults.guard import process_of, read_drains
from jrl.launch import __main__ as command
from jrl.launch import ssh_hosts

SETTINGS = {
    "model": "micro",
    "layout": "dp4",
    "devices": 4,
    "steps": 120,
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
    "faults-continuity": 5,  # and so the seconds between two looks of the detector
    "on-fault": "drain",
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]
# Four processes on a few cores: each computes on one.
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
HOSTS = ("127.0.0.1", "localhost", "node2", "node3")
"""All are this machine; the others reach the first two, one of them process 0's."""
SICK = 0
"""The process that the others reach, and that has the detector."""
CLEAN_STEPS = 60
"""Steps of half a second before the fault: an alarm could come after 20 seconds."""
STOPPED, RUNNING = 4.5, 0.5
"""Seconds of SIGSTOP in turn, as on a host that something else keeps busy. Steps are as slow on all
others, which wait for it."""
WAIT = 1800
"""Seconds for what takes a few dozen."""


def count_steps(run):
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


@pytest.mark.slow
def test_the_others_finish_the_run_without_a_faulty_host(
    ssh, monkeypatch, tmp_path, free_port, capfd
):
    monkeypatch.setattr(ssh_hosts, "MODULE", "drained_training")
    run, seen = tmp_path / "run", []

    def slow():
        deadline = time.monotonic() + WAIT
        while count_steps(run) < CLEAN_STEPS and time.monotonic() < deadline:
            time.sleep(0.2)
        records = read_folder(run / "faults")[0]
        [pid] = [each.pid for each in records if process_of(each.machine) == SICK]
        seen.append((len(read_drains(run)), count_steps(run)))
        with contextlib.suppress(ProcessLookupError):
            while not read_drains(run) and time.monotonic() < deadline:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED)
                os.kill(pid, signal.SIGCONT)
                time.sleep(RUNNING)

    threading.Thread(target=slow, daemon=True).start()
    options = [f"--hosts={','.join(HOSTS)}", "--elastic=2", f"--port={free_port}"]
    environment = [f"--env=XLA_FLAGS={os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"]
    status = command.main([*options, *environment, "--", *FLAGS, "--faults"])
    captured = capfd.readouterr()
    assert status == 0, captured.err[-3000:]
    [(drains_before, step_before)] = seen
    assert drains_before == 0  # a clean run is not touched
    [drain] = read_drains(run)
    assert (drain.process, drain.alarm["metric"]) == (SICK, SLOWDOWN), drain
    assert step_before <= drain.step <= step_before + 60
    assert drain.restart.processes == (1, 2, 3)
    assert drain.restart.layout.startswith("tp1 cp1 dp3")
    line = f"127.0.0.1 is drained: the run continues after step {drain.step} on localhost, node2"
    assert line in captured.out
    machine = drain.alarm["machine"]
    assert f"drained {machine} after step {drain.step}: {machine} stands out in" in captured.out
    assert "ending the others" not in captured.err
    steps = [line["step"] for line in metrics(run)]
    assert steps == list(range(SETTINGS["steps"] + 1))
