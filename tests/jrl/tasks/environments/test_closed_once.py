"""Each environment that began is closed once, however its conversation ends."""

from collections import Counter

import pytest
from confinement import wait_until

from jrl.tasks import load_task
from jrl.tasks.environments import host as hosts
from jrl.tasks.environments.host import LocalHost, Scoring
from jrl.tasks.rewards import RewardSettings
from jrl.tasks.task import Example

SOURCE = '''
import itertools, os, subprocess, time

NUMBERS = itertools.count()


class Logged:
    """Writes down when it begins and when it is closed, and does what it is told."""

    def __init__(self, log, fault):
        self.log, self.fault, self.name = log, fault, f"{os.getpid()}-{next(NUMBERS)}"

    def write(self, event):
        with open(self.log, "a") as file:
            file.write(f"{event} {self.name}\\n")

    def reset(self):
        self.write("begun")
        if self.fault == "reset":
            raise RuntimeError("no beginning")
        return "go on"

    def step(self, message):
        text = message["content"]
        self.write("stepped")
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "raise":
            raise RuntimeError("no such thing")
        if text == "sleep":
            time.sleep(0.3)
        if text == "hang":
            child = subprocess.Popen(["sleep", "60"])
            with open(self.log, "a") as file:
                file.write(f"child {child.pid}\\n")
            time.sleep(60)
        return "go on", float("nan") if text == "nan" else 0.0, text == "stop"

    def close(self):
        self.write("closed")
        if self.fault == "close":
            raise RuntimeError("no end")


class Task:
    prompts = [{"prompt": str(number), "log": os.devnull, "fault": ""} for number in range(4)]

    def environment(self, log, fault):
        return Logged(log, fault)
'''


class Log:
    """Log of events that environments write."""

    def __init__(self, path):
        self.path = path

    def example(self, fault=""):
        return Example("", "", record={"log": str(self.path), "fault": fault})

    def named(self, event):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == event]

    def await_(self, event, number=1):
        """Waits until an event has happened this many times."""
        wait_until(lambda: len(self.named(event)) >= number, f"{event} did not happen")

    def closed_once(self):
        """The number of environments that began, if each was closed once; else None."""
        begun, closed = Counter(self.named("begun")), Counter(self.named("closed"))
        return len(begun) if begun == closed and set(closed.values()) <= {1} else None


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / "log")


@pytest.fixture(params=["worker", "local"])
def host(request, tmp_path):
    if request.param == "local":
        module = {}
        exec(SOURCE, module)
        host = LocalHost(module["Task"](), Scoring())
    else:
        host = worker_host(tmp_path)
    yield host
    host.close()


def worker_host(tmp_path, seconds=30.0):
    path = tmp_path / "logged.py"
    path.write_text(SOURCE)
    # One worker, so that conversations meet in it.
    return load_task(
        f"{path}:Task", 0, workers=1, rewards=RewardSettings(seconds=seconds)
    ).environments


def failed(host, number, example, said):
    """Whether a turn failed; in this process it raises."""
    try:
        return host.say(number, example, said).result().failure is not None
    except RuntimeError:
        return True


def test_host_closes_ended_and_dropped_conversations_once(host, log):
    example = log.example()
    assert host.opening_messages(example.record) == [["user", "go on"]]
    assert log.closed_once() == 1
    assert host.say(1, example, ["a"]).result().messages
    assert host.say(1, example, ["a", "stop"]).result().done
    assert failed(host, 2, example, ["nan"]) and failed(host, 3, example, ["raise"])
    assert failed(host, 4, log.example("reset"), ["a"])
    assert log.closed_once() == 5
    # Its turn is being answered: what is open is known when it has been.
    dropped = host.say(5, example, ["sleep"])
    host.end(5)
    assert not dropped.result().done
    log.await_("closed", 6)
    host.end(5)
    host.end(1)
    host.close()
    host.close()
    assert log.closed_once() == 6


def test_host_close_closes_open_environments(host, log):
    for number, fault in enumerate(("", "close", "")):
        host.say(number, log.example(fault), ["a"]).result()
    assert log.closed_once() is None
    if isinstance(host, LocalHost):
        with pytest.raises(RuntimeError, match="no end"):
            host.close()
    else:
        host.say(9, log.example(), ["sleep"])
        log.await_("stepped", 4)
        # Dropped and not yet told so.
        host.end(0)
        host.close()
    host.close()
    assert log.closed_once() == (3 if isinstance(host, LocalHost) else 4)


def test_host_warns_of_failed_close(tmp_path, log, capsys):
    host = worker_host(tmp_path)
    for number in range(2):
        host.say(number, log.example("close"), ["a"]).result()
    host.end(0)
    log.await_("closed")
    host.close()
    expected = "an environment could not be closed: RuntimeError: no end"
    assert expected in capsys.readouterr().err and log.closed_once() == 2


def test_local_host_closes_environment_of_interrupted_step(log):
    module = {}
    exec(SOURCE, module)
    host = LocalHost(module["Task"](), Scoring())
    host.say(1, log.example(), ["a"])
    with pytest.raises(KeyboardInterrupt):
        host.say(2, log.example(), ["interrupt"])
    host.close()
    assert log.closed_once() == 2


def test_worker_closes_environments_of_killed_trainer(tmp_path, log):
    host = worker_host(tmp_path)
    host.say(1, log.example(), ["a"]).result()
    worker = host._workers[0].worker
    worker._input.close()  # as the system does for a process that is no more
    worker._process.wait(30)
    assert log.closed_once() == 1
    host.close()


def test_host_close_kills_hanging_environment_and_its_child(tmp_path, log, monkeypatch):
    monkeypatch.setattr(hosts, "CLOSING_SECONDS", 0.2)
    host = worker_host(tmp_path)
    host.say(1, log.example(), ["hang"])
    log.await_("child")
    (child,) = map(int, log.named("child"))
    assert _runs(child)
    host.close()
    wait_until(lambda: not _runs(child), "what the environment started goes on")


def _runs(pid):
    """Whether a process runs; one that has ended may wait to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
