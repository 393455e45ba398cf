"""Four processes that really compute, one of them really slowed: the watcher names that one."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from places import ROOT, SUPPORT

MACHINES = tuple(f"host-{number}" for number in range(4))
ALARM_WITHIN = 12.0
"""Seconds from the fault to the alarm: window and continuity are 8 of them, the rest is for a
machine that others use too."""
CLEAN = 8.5
"""Seconds of the clean run before it: window and continuity, so that an alarm could come."""
# A threshold of 6 is a factor of 3.3. The fault is a factor of ten; that others use the same cores
# makes one healthy process two or three times as slow as another for seconds.
WATCH = (
    "--detector=outlier",
    "--window=4",
    "--continuity=4",
    "--threshold=6",
    "--interval=0.5",
    "--until-fault",
)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    # Four processes on a few cores: each computes on one.
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


@contextmanager
def slowed(pid: int):
    """Stopped for nine tenths of the time, as a host is that something else keeps busy."""
    done = threading.Event()

    def stop_and_go():
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            done.wait(1.8)
            os.kill(pid, signal.SIGCONT)
            done.wait(0.2)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def training(run: Path):
    """Four processes that begin together and end together."""
    (run / "faults").mkdir()
    command = [sys.executable, str(SUPPORT / "training_process.py"), str(run)]
    processes = [subprocess.Popen([*command, name], env=ENVIRONMENT) for name in MACHINES]
    try:
        while len(list(run.glob("*.ready"))) < len(processes):
            assert all(each.poll() is None for each in processes), "a process died at its start"
            time.sleep(0.05)
        (run / "go").touch()
        yield processes
        (run / "stop").touch()
        assert [each.wait(60) for each in processes] == [0] * len(processes)
    finally:
        for each in processes:
            each.kill()
            each.wait()


@contextmanager
def watching(run: Path):
    """The watcher, as a user starts it, and the file its hook writes to."""
    named = run / "named"
    hook = f'echo "$JRL_FAULT_MACHINE $JRL_FAULT_METRIC $JRL_FAULT_START" >> "{named}"'
    command = [sys.executable, "-m", "jrl.faults", "watch", str(run), *WATCH, f"--on-fault={hook}"]
    watcher = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        yield watcher, named
    finally:
        watcher.kill()
        watcher.communicate()


@pytest.mark.slow
def test_the_watcher_names_the_slowed_process_and_no_other(tmp_path):
    sick = 2
    with training(tmp_path) as processes, watching(tmp_path) as (watcher, named):
        assert watcher.stdout.readline() == "host-0: running\n"
        time.sleep(CLEAN)
        assert not named.exists(), named.read_text()
        begun = time.time()
        with slowed(processes[sick].pid):
            while not named.exists() and time.time() < begun + ALARM_WITHIN:
                time.sleep(0.05)
        output, _ = watcher.communicate(timeout=20)
    assert watcher.returncode == 3, output
    machine, metric, start = named.read_text().split()
    assert machine == MACHINES[sick], output
    assert metric in ("step/time", "cpu/process")
    assert begun - 4 <= float(start) <= begun + ALARM_WITHIN
    assert f"ALARM: {machine} stands out in {metric}" in output
