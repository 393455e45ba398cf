"""Worker that hangs, dies or does not start: it costs one answer and leaves no process."""

import os
import queue
import signal
import subprocess
import sys
import threading
import warnings

import pytest
from confinement import runs, wait_until
from tiers import full_but

from jrl.tasks.workers.process import Worker, WorkerEnded, next_line

# Echoes, and does on demand what third-party code may do.
PROGRAM = """
import json, os, sys, time
if "broken" in sys.argv:
    print(json.dumps({"error": "no such library"}), flush=True)
    sys.exit(1)
print("{}", flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if "sleep" in question:
        time.sleep(question["sleep"])
    if "power" in question:
        question["power"] ** question["power"]
    if "exit" in question:
        os._exit(question["exit"])
    print(json.dumps(question | {"pid": os.getpid()}), flush=True)
"""
COMMAND = [sys.executable, "-c", PROGRAM]


@pytest.fixture
def worker():
    # The limit leaves room for a machine that is busy; the questions that hang would take minutes.
    made = Worker(COMMAND, seconds=1.0)
    yield made
    made.close()


def in_a_thread(function):
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(function()))
    thread.start()
    thread.join()
    return outcome[0]


def test_worker_answers_in_one_process(worker):
    first = worker.ask({"text": "é\n\ud800"})
    assert first.pop("text") == "é\n\ud800"
    assert worker.ask({})["pid"] == first["pid"] != os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("question", full_but([{"sleep": 600}, {"power": 10**9}], {"power": 10**9}))
def test_worker_timeout_off_the_main_thread(worker, question):
    def ask():
        pid = worker.ask({})["pid"]
        with pytest.raises(TimeoutError, match=r"no answer within 1\.0 seconds"):
            worker.ask(question)
        return pid, worker.ask({"next": 3})

    pid, answer = in_a_thread(ask)
    assert answer["next"] == 3
    assert answer["pid"] != pid
    assert not runs(pid)


def test_worker_ask_with_its_own_time_limit():
    worker = Worker(COMMAND, seconds=0.1)
    assert worker.ask({"sleep": 0.4}, seconds=30.0)["sleep"] == 0.4
    worker.close()


def test_worker_raises_error_of_process_that_dies(worker):
    with pytest.raises(WorkerEnded, match="ended before it answered"):
        worker.ask({"exit": 3})
    assert worker.ask({"next": 3})["next"] == 3


def test_worker_restarts_process_that_died_idle(worker):
    pid = worker.ask({})["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert worker.ask({"next": 3})["next"] == 3


def test_worker_reports_program_that_does_not_start():
    worker = Worker([*COMMAND, "broken"])
    with pytest.raises(WorkerEnded, match="no such library"):
        worker.ask({})
    worker.close()


def test_worker_limits_time_of_start():
    worker = Worker([sys.executable, "-c", "input()"], startup_seconds=0.2)
    with pytest.raises(TimeoutError, match=r"0\.2 seconds"):
        worker.ask({})
    worker.close()


def test_worker_is_shared_by_threads(worker):
    answers = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append((n, worker.ask({"n": n})["n"])))
        for n in range(7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [(n, n) for n in range(7)]


def test_worker_close_ends_process(worker):
    pid = worker.ask({})["pid"]
    worker.close()
    assert not runs(pid)
    worker.close()
    with pytest.raises(ValueError, match="worker is closed and answers no more"):
        worker.ask({})


def test_forgotten_worker_is_ended():
    worker = Worker(COMMAND)
    pid = worker.ask({})["pid"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        del worker
    assert not runs(pid)


@pytest.mark.slow
def test_worker_ends_with_killed_parent(tmp_path):
    parent = (
        "import os, signal, sys; from jrl.tasks.workers.process import Worker\n"
        f"print(Worker({COMMAND!r}).ask({{}})['pid'], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    # Not read to the end of the file: that end comes only when everyone who holds it is gone.
    output = tmp_path / "pid"
    with output.open("w") as file:
        subprocess.run([sys.executable, "-c", parent], stdout=file, check=False)
    pid = int(output.read_text())
    wait_until(lambda: not runs(pid), "the worker outlives its parent")


def test_next_line_excludes_frozen_time():
    class Lines:
        """Waits of the given lengths; the last one brings the answer."""

        def __init__(self, *lasting):
            self.lasting, self.now, self.waits = list(lasting), 0.0, []

        def get(self, timeout):
            self.waits.append(timeout)
            self.now += self.lasting.pop(0)
            if self.lasting:
                raise queue.Empty
            return "answer"

    def received(seconds, *lasting):
        lines = Lines(*lasting)
        return next_line(lines.get, seconds, lambda: lines.now), lines.waits

    assert received(1.2, 0.5, 0.5, 0.1) == ("answer", pytest.approx([0.5, 0.5, 0.2]))
    assert received(0.2, 60.0, 0.1) == ("answer", [0.2, 0.2])
    with pytest.raises(queue.Empty):
        received(0.7, 60.0, 0.5, 0.25, 0.1)
