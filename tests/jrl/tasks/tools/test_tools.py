"""What a sandbox lets code do."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jrl.tasks.tools.python import Sandbox, python_tool
from jrl.tasks.workers import sandbox as sandbox_program

linux = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")


@linux
def test_code_runs_within_limits():
    sandbox = Sandbox(seconds=2.0, memory_mb=256, output=50)
    try:
        sandbox.run("")
    except ValueError as refused:
        # A system that cannot take the network away says so, and what to do.
        assert "network=True" in str(refused)
        sandbox = Sandbox(seconds=2.0, memory_mb=256, output=50, network=True)
    assert sandbox.run("print(6 * 7)") == "42\n"
    assert "ZeroDivisionError" in Sandbox(network=sandbox.network).run("1 / 0")
    assert sandbox.run("print('y' * 10**6)").startswith("y" * 50 + "\n(cut")
    assert "MemoryError" in Sandbox(network=sandbox.network).run("x = 'a' * 10**10")
    assert sandbox.run("import os\nprint(sorted(os.environ))") == (
        "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED']\n"
    )
    assert sandbox.run("raise SystemExit(3)") == "(ended with status 3)"


@linux
@pytest.mark.slow
def test_code_has_no_network_and_leaves_nothing_behind(tmp_path):
    sandbox = Sandbox(seconds=1.0)
    try:
        sandbox.run("")
    except ValueError:
        pytest.skip("this system gives no namespaces")
    code = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=0.5)"
    assert "OSError" in sandbox.run(code) or "unreachable" in sandbox.run(code)
    assert "stopped after 1 seconds" in sandbox.run("while True: pass")
    mark = tmp_path / "mark"
    left = (
        "import subprocess, sys\n"
        f"code = 'import time; time.sleep(2); open({str(mark)!r}, \"w\")'\n"
        "subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
    )
    sandbox.run(left)
    time.sleep(2.5)
    assert not mark.exists()


def test_the_policy_is_told_what_its_code_has():
    parameters = python_tool(Sandbox(seconds=2, network=True)).parameters
    about = parameters["properties"]["code"]["description"]
    assert about == "A program; it has 2 seconds and a network."


@linux
def test_code_ends_with_whoever_waits_for_it():
    """An interrupt, and a process that is killed."""

    def interrupted(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            Sandbox(seconds=61.0, network=True).run("import time; time.sleep(60)")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not running('{"seconds": 61.0')

    settings = '{"seconds": 62.0, "memory": 500000000, "file": 1000, "network": true}'
    waits = (
        "import subprocess, sys, time\n"
        "command = [sys.executable, '-I', *sys.argv[1:]]\n"
        "code = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)\n"
        "code.communicate(b'import time; print(1, flush=True); time.sleep(60)')\n"
    )
    command = [sys.executable, "-c", waits, sandbox_program.__file__, settings]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout.read(1) == b"1"
    assert running('{"seconds": 62.0') == 3  # the waiting one, what limits the code, and the code
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 30
    while running('{"seconds": 62.0'):
        assert time.monotonic() < end, "the code goes on"
        time.sleep(0.01)


def running(argument):
    """Processes with an argument that begins like this."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += f"\0{argument}" in path.read_text(errors="replace")
    return found
