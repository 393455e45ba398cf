"""Launch over ssh, with an `ssh` on the PATH that runs the command on this machine."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_runs import metrics

from jrl.launch import ssh_hosts
from jrl.launch.program import Program
from jrl.launch.ssh_hosts import Hosts, launch, parse_hosts


@pytest.fixture
def program(monkeypatch, ssh):
    monkeypatch.setattr(ssh_hosts, "MODULE", "launched_program")
    return lambda *words: Program(words, Path("run"))


def test_hosts_are_names():
    assert parse_hosts("a, user@b,c") == ("a", "user@b", "c")
    for text in ("", "a,,b", "a,-oProxyCommand=x", "a b"):
        with pytest.raises(ValueError, match="must be names with commas between"):
            parse_hosts(text)


def test_the_first_host_is_the_coordinator():
    assert Hosts(("user@a", "b")).coordinator == "a:7733"
    assert Hosts(("fe80::1",), port=1).coordinator == "[fe80::1]:1"


def test_each_host_runs_the_program_with_an_index_of_its_own(program, capfd):
    assert launch(program("dapo", "--task", "a b$c'd"), Hosts(("a", "b"), 7001)) == 0
    captured = capfd.readouterr()
    shared = "dapo --task a b$c'd --coordinator a:7001 --num-processes 2 --process-id"
    assert sorted(captured.out.splitlines()) == [f"a: {shared} 0", f"b: {shared} 1"]
    assert sorted(captured.err.splitlines()) == ["a: to standard error", "b: to standard error"]


def test_variables_reach_the_program(program, tmp_path, capfd, monkeypatch):
    (tmp_path / "variables.py").write_text("import os; print(os.environ['X'], os.getcwd())")
    monkeypatch.setattr(ssh_hosts, "MODULE", "variables")
    hosts = Hosts(("a",), environment={"PYTHONPATH": str(tmp_path), "X": "1 '2"})
    assert launch(program(), hosts) == 0
    assert capfd.readouterr().out == f"a: 1 '2 {tmp_path}\n"


def test_all_end_when_one_fails(program, capfd):
    assert launch(program("--wait", "--fail-in", "1"), Hosts(("a", "b", "c"))) == 3
    captured = capfd.readouterr()
    assert {"a: saved", "c: saved"} < set(captured.out.splitlines())
    assert "error: b ended with status 3; ending the others\n" in captured.err


def test_a_host_that_cannot_be_reached_is_named(program, capfd):
    assert launch(program("--wait"), Hosts(("a", "down"))) == 255
    captured = capfd.readouterr()
    assert "down: ssh: connect to host down port 22: No route to host" in captured.err
    assert "error: down cannot be reached by ssh, or the connection was lost" in captured.err


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_asks_all_to_save(program, capfd, tmp_path, signum, status):
    def interrupt():
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signum)

    threading.Thread(target=interrupt).start()
    assert launch(program("--wait"), Hosts(("a", "b"))) == status
    assert {"a: saved", "b: saved"} < set(capfd.readouterr().out.splitlines())


def record_of_drain(restart):
    alarm = {"machine": "b-1", "line": "b-1 stands out"}
    record = {"number": 1, "time": 0.0, "step": 7, "num_processes": 3, "process": 1}
    return json.dumps(record | {"alarm": alarm, "restart": restart})


def test_a_drained_run_continues_without_the_host(program, capfd, tmp_path):
    restart = {"processes": [0, 2], "flags": ["--layout", "tp2 dp2"], "layout": "tp2 dp2"}
    (tmp_path / "drain.json").write_text(record_of_drain(restart))
    words = ("--layout", "tp2 dp3", "--drained-of", "3")
    assert launch(program(*words), Hosts(("a", "b", "c"), 7001)) == 0
    captured = capfd.readouterr()
    line = "b is drained: the run continues after step 7 on a, c with layout 'tp2 dp2'"
    lines = captured.out.splitlines()
    assert line in lines and "ending the others" not in captured.err
    index = lines.index(line)
    words = "--layout tp2 dp3 --drained-of 3"
    before = f"{words} --coordinator a:7001 --num-processes 3 --process-id"
    assert sorted(lines[:index]) == [f"a: {before} 0", f"b: {before} 1", f"c: {before} 2"]
    after = before.replace(" --coord", " --layout tp2 dp2 --coord").replace(
        "processes 3", "processes 2"
    )
    assert sorted(lines[index + 1 :]) == [f"a: {after} 0", f"c: {after} 1"]


@pytest.mark.slow
@pytest.mark.parametrize("has_record", [True, False])
def test_a_drained_run_without_a_restart_ends(program, capfd, tmp_path, monkeypatch, has_record):
    monkeypatch.setattr(ssh_hosts, "RECORD_SECONDS", 0.1)
    if has_record:
        (tmp_path / "drain.json").write_text(record_of_drain(None))
    assert launch(program("--drained-of", "1"), Hosts(("a",))) == 75
    assert ("error: run has no record of the drain" in capfd.readouterr().err) != has_record


@pytest.mark.slow
def test_killed_launcher_ends_its_processes(program, tmp_path):
    script = (
        "from pathlib import Path; from jrl.launch import ssh_hosts\n"
        "from jrl.launch.program import Program\n"
        "ssh_hosts.MODULE = 'launched_program'\n"
        f"words = ('--wait', '--named', {str(tmp_path)!r})\n"
        "ssh_hosts.launch(Program(words, Path('run')), ssh_hosts.Hosts(('a', 'b')))\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    while commands_with(f"--named {tmp_path}"):
        assert time.monotonic() < deadline, "the processes were left running"
        time.sleep(0.1)


def commands_with(words):
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in command and "launched_program" in command and " sh -c" not in f" {command}":
            result.append(command)
    return result


SETTINGS = {
    "layout": "dp2",
    "devices": 2,
    "steps": 2,
    "warm-start-steps": 0,
    "warm-start-batch": 4,
    "prompts": 4,
    "group-size": 2,
    "mini-batch": 8,
    "eval-prompts": 4,
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]


@pytest.mark.slow
def test_two_hosts_make_the_run_of_one_process(ssh, tmp_path, free_port):
    hosts = ["--hosts=localhost,localhost", f"--port={free_port}"]
    commands = {
        "two": ["-m", "jrl.launch", *hosts, "--", *FLAGS],
        "one": ["-m", "jrl.train", *FLAGS],
    }
    for name, words in commands.items():
        done = subprocess.run(
            [sys.executable, *words, f"--run-dir={name}"],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("completed step: 2/2") == 1
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert len(metrics(tmp_path / "two")) == 1 + SETTINGS["steps"]
