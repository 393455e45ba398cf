"""Signals: the first is a request, a second Ctrl-C an order."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from jrl.processes import stopping
from jrl.processes.stopping import Stop

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def said(capfd, words):
    """Waits for a line on standard error, which another thread writes."""
    text, deadline = "", time.monotonic() + 10
    while words not in text and time.monotonic() < deadline:
        time.sleep(0.01)
        text += capfd.readouterr().err
    return text


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "Ctrl-C: finishing step 3; Ctrl-C again stops immediately\n"),
        (signal.SIGTERM, "SIGTERM: finishing step 3; Ctrl-C stops immediately\n"),
        (signal.SIGHUP, "SIGHUP: finishing step 3; Ctrl-C stops immediately\n"),
    ],
)
def test_stop_first_signal_is_a_request_with_a_message(number, line, capfd):
    # An ignored signal stays so, as SIGHUP is under nohup.
    inherited = signal.signal(number, signal.default_int_handler)
    before = [signal.getsignal(each) for each in SIGNALS]
    with Stop() as stop:
        assert not stop
        stop.doing = "finishing step 3"
        os.kill(os.getpid(), number)
        assert stop
        assert said(capfd, "immediately\n") == line
    assert [signal.getsignal(each) for each in SIGNALS] == before
    signal.signal(number, inherited)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_run_whose_terminal_is_closed_finishes_its_work(tmp_path):
    """It goes on printing, as a display does."""
    program = f"""
import fcntl, pathlib, signal, termios, time
from jrl.processes.stopping import Stop
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
with Stop() as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.01)
    for _ in range(20):
        print("finishing", flush=True)
        time.sleep(0.01)
pathlib.Path({str(tmp_path / "saved")!r}).touch()
"""
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", program]
    child = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, start_new_session=True)
    os.close(end)
    try:
        while b"ready" not in os.read(terminal, 100):
            pass
        os.close(terminal)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    assert (tmp_path / "saved").exists()


def test_a_second_interrupt_is_an_exception():
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
    with pytest.raises(KeyboardInterrupt), Stop():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
    # The thread goes with the block.
    deadline = time.monotonic() + 10
    while any(thread.name == "jrl signals" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stop_keeps_ignored_signals_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_listens_to_nothing():
    before, found = signal.getsignal(signal.SIGINT), []

    def listen():
        with Stop() as stop:
            found.append((bool(stop), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [(False, before)]


def test_a_second_interrupt_ends_a_process_that_is_in_a_long_call():
    """Python runs no handler before the call of the library returns."""
    program = (
        "import hashlib, importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('stopping', {stopping.__file__!r})\n"
        "stopping = importlib.util.module_from_spec(spec); spec.loader.exec_module(stopping)\n"
        "stopping.GRACE_SECONDS = 0.2\n"
        "with stopping.Stop(lambda: print('closed', flush=True)):\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("Ctrl-C: finishing work in flight; Ctrl-C a")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "closed\n")
    assert errors == "stopped immediately; what has been saved is kept\n"
