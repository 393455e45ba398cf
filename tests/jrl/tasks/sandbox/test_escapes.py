"""Escapes from the sandbox, tried by code in it: each ends in an error."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from confinement import needs_bubblewrap, processes_with, wait_until

from jrl.tasks.sandbox import cgroups
from jrl.tasks.sandbox.sandbox import Sandbox

pytestmark = needs_bubblewrap
LONG = 600
"""Seconds that code would like to take; no test waits for them."""


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(seconds=20, memory_mb=256, output=4000, processes=32)


@pytest.fixture
def mark():
    """A word that no other process of the machine has in its command line."""
    return f"mark-{uuid.uuid4()}"


def tries(code):
    """Code that defines `attempt(f, ...)`: it prints the result of a call, or its error."""
    return (
        "import ctypes, errno, fcntl, os, signal, socket, subprocess, sys, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def attempt(f, *given):\n"
        "    try:\n"
        "        print('did', f(*given))\n"
        "    except OSError as error:\n"
        "        print(errno.errorcode[error.errno])\n"
        "def call(number, *given):\n"
        "    if libc.syscall(number, *given) < 0:\n"
        "        code = ctypes.get_errno()\n"
        "        raise OSError(code, os.strerror(code))\n" + code
    )


def spawning(mark):
    """Code that starts a process in its own session. It ignores signals and its parent's end, and
    holds the output open."""
    child = (
        "import ctypes, signal, time\n"
        "ctypes.CDLL(None).prctl(1, 0)\n"
        "for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
        f"time.sleep({LONG})\n"
    )
    return (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, {mark!r}], start_new_session=True)\n"
    )


def test_01_started_process_ends_with_code(sandbox, mark):
    before = time.monotonic()
    assert sandbox.run(spawning(mark) + "print('done')") == "done\n"
    assert time.monotonic() - before < 8
    assert processes_with(mark) == []


def test_02_it_outlives_its_parents_without_a_parent_death_signal(sandbox, mark):
    code = (
        "import ctypes, os, time\n"
        "ctypes.CDLL(None).prctl(1, 0)\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n" + spawning(mark) + f"time.sleep({LONG})\n"
    )
    before = time.monotonic()
    assert sandbox.run(code) == ""
    assert time.monotonic() - before < 8
    assert processes_with(mark) == []


def test_03_the_time_is_up_while_its_output_is_open(mark):
    for silent in ("", "os.close(1); os.close(2); "):
        code = f"import os, time; print(1, flush=True); {silent}time.sleep({LONG})"
        before = time.monotonic()
        assert Sandbox(seconds=0.5).run(spawning(mark) + code) == "1\n\n(stopped after 0.5 seconds)"
        assert time.monotonic() - before < 8
        assert processes_with(mark) == []


def test_04_signals_to_the_init_process(sandbox):
    code = (
        "print(os.getppid())\n"
        "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):\n"
        "    os.kill(1, number)\n"
        "time.sleep(0.1)\n"
        "print('alive')"
    )
    assert sandbox.run(tries(code)) == "1\nalive\n"


def test_05_the_memory_of_the_init_process(sandbox):
    code = (
        "attempt(open, '/proc/1/mem', 'rb')\n"
        "attempt(open, '/proc/1/environ')\n"
        "attempt(os.readlink, '/proc/1/fd/0')\n"
        "attempt(open, '/proc/1/fd/2', 'w')\n"
        "attempt(call, {'x86_64': 101, 'aarch64': 117}[os.uname().machine], 16, 1, 0, 0)\n"
    )
    assert sandbox.run(tries(code)) == "EACCES\n" * 4 + "EPERM\n"


def test_06_files_of_the_host(sandbox, tmp_path):
    (tmp_path / "secret").write_text("secret")
    here = Path(__file__)
    code = (
        f"attempt(open, {str(tmp_path / 'secret')!r})\n"
        f"attempt(open, {str(here)!r})\n"
        f"attempt(os.listdir, {str(here.parents[4] / 'tests')!r})\n"
        "for path in ('/etc/passwd', '/etc/shadow', '/var/log', '/run', '/sys', '/boot'):\n"
        "    attempt(os.stat, path)\n"
    )
    assert sandbox.run(tries(code)) == "ENOENT\n" * 9


def test_07_writing_to_the_host(sandbox, tmp_path):
    places = [Path(sys.prefix, "lib"), Path(os.__file__).parent, Path(os.__file__), Path("/")]
    code = (
        f"for path in {[str(path) for path in places]!r}:\n"
        "    attempt(os.utime, path)\n"
        "attempt(open, '/file', 'w')\n"
        "attempt(open, '/dev/file', 'w')\n"
        "attempt(os.chmod, os.__file__, 0o777)\n"
        "attempt(os.remove, '/init.py')\n"
        f"os.makedirs({str(tmp_path)!r}, exist_ok=True) if {str(tmp_path)!r}[:5] == '/tmp/' "
        "else None\n"
        f"attempt(lambda: open({str(tmp_path / 'file')!r}, 'w').close())\n"
    )
    said = sandbox.run(tries(code)).split()
    # Beside a read-only place, what looks like the host's folder is a private one in memory.
    assert said[:8] == ["EROFS"] * 7 + ["EBUSY"] or said[:8] == ["EROFS"] * 8
    assert list(tmp_path.iterdir()) == []


def test_08_processes_of_the_host(sandbox):
    code = (
        "print(sorted(name for name in os.listdir('/proc') if name.isdigit()), os.getpid())\n"
        f"attempt(os.kill, {os.getpid()}, 0)\n"
    )
    assert sandbox.run(tries(code)) == "['1', '2'] 2\nESRCH\n"


def test_09_unix_sockets_of_the_host(sandbox, tmp_path):
    abstract = f"\0{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as nameless:
        named.bind(os.path.relpath(tmp_path / "s"))  # a path of a socket has 108 characters
        nameless.bind(abstract)
        for server in (named, nameless):
            server.listen()
        code = (
            f"attempt(socket.socket(socket.AF_UNIX).connect, {abstract!r})\n"
            f"attempt(socket.socket(socket.AF_UNIX).connect, {str(tmp_path / 's')[:100]!r})\n"
        )
        assert sandbox.run(tries(code)) == "ECONNREFUSED\nENOENT\n"


def test_10_the_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"attempt(socket.create_connection, ('127.0.0.1', {port}), 5)\n"
        assert sandbox.run(tries(code)) == "EAFNOSUPPORT\n"
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_11_sockets_that_no_network_namespace_holds(sandbox):
    code = "for family in (16, 17, 38, 40): attempt(socket.socket, family, socket.SOCK_RAW)"
    assert sandbox.run(tries(code)) == "EAFNOSUPPORT\n" * 4


@pytest.fixture(params=[True, False], ids=["control groups", "no control groups"])
def grouped(request, monkeypatch):
    """With control groups, if this machine has some, and with none."""
    if not request.param:
        monkeypatch.setattr(cgroups, "_parents", lambda: None)


@pytest.mark.usefixtures("grouped")
def test_12_a_fork_bomb(mark):
    code = spawning(mark) + (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    sandbox = Sandbox(seconds=0.5, processes=16)
    assert sandbox.run(code) in (
        "(stopped after 0.5 seconds)",
        "(stopped: more than 16 processes)",
    )
    assert processes_with(mark) == []


def test_12_processes_that_the_kernel_does_not_count(mark, monkeypatch):
    """The kernel counts no process of root, and an old one counts all of a user's on the
    machine."""
    monkeypatch.setattr(cgroups, "_parents", lambda: None)
    monkeypatch.setattr("jrl.tasks.sandbox.sandbox._kernel_version", lambda: (4, 18))
    code = spawning(mark) + (
        "import os, time\n"
        "for _ in range(32):\n"
        f"    if not os.fork(): time.sleep({LONG})\n"
        f"time.sleep({LONG})\n"
    )
    sandbox = Sandbox(seconds=20, processes=16)
    assert sandbox.run(code) == "(stopped: more than 16 processes)"
    assert processes_with(mark) == []


@pytest.mark.usefixtures("grouped")
def test_13_memory_of_many_processes(mark):
    code = spawning(mark) + (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if not os.fork():\n"
        "        kept = b'x' * (60 * 2**20)\n"
        f"        time.sleep({LONG})\n"
        f"time.sleep({LONG})\n"
    )
    before = time.monotonic()
    sandbox = Sandbox(seconds=20, memory_mb=192)
    assert sandbox.run(code) == "(stopped: more than 192 MB of memory)"
    assert time.monotonic() - before < 8
    assert processes_with(mark) == []


def test_14_memory_that_is_no_process(sandbox):
    code = (
        "def fill(folder):\n"
        "    for number in range(100):\n"
        "        with open(f'{folder}/{number}', 'wb') as file: file.write(bytes(2**21))\n"
        "attempt(fill, '/tmp')\n"
        "attempt(fill, '/dev/shm')\n"
        "attempt(os.memfd_create, 'x')\n"
        "attempt(call, {'x86_64': 29, 'aarch64': 194}[os.uname().machine], 0, 2**20, 0o1600)\n"
    )
    assert sandbox.run(tries(code)) == "ENOSPC\nENOSPC\nEPERM\nEPERM\n"


def test_15_a_file_that_is_too_large(sandbox):
    code = (
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with open('a', 'wb', 0) as file: attempt(file.truncate, 2**30)\n"
    )
    assert sandbox.run(tries(code)) == "EFBIG\n"


def test_16_files_without_end(sandbox):
    code = "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1"
    assert sandbox.run(code) == "(stopped: more than 10000 files)"


def test_17_namespaces_and_mounts(sandbox):
    code = (
        "unshare, mount = ({'x86_64': 272, 'aarch64': 97}[os.uname().machine],\n"
        "                  {'x86_64': 165, 'aarch64': 40}[os.uname().machine])\n"
        "attempt(call, unshare, 0x10000000)\n"
        "attempt(call, mount, b'tmpfs', b'/tmp', b'tmpfs', 0, 0)\n"
        "attempt(call, {'x86_64': 56, 'aarch64': 220}[os.uname().machine], 0x10000011, 0, 0, 0)\n"
        "attempt(call, 435, 0, 0)\n"
        "attempt(os.chroot, '/tmp')\n"
    )
    assert sandbox.run(tries(code)) == "EPERM\nEPERM\nEPERM\nENOSYS\nEPERM\n"


def test_18_privileges(sandbox):
    """Code has no capability and gains none, as root too, and the filter stays."""
    code = (
        "kinds = ('CapI', 'CapP', 'CapE', 'CapA', 'NoNew', 'Seccomp:')\n"
        "for line in open('/proc/self/status'):\n"
        "    if line.startswith(kinds): print(*line.split())\n"
        "attempt(os.setuid, 0)\n"
        "attempt(os.mknod, '/tmp/disk', 0o60666, os.makedev(8, 0))\n"
    )
    nothing = "0" * 16
    assert sandbox.run(tries(code)).splitlines() == [
        *(f"Cap{kind}: {nothing}" for kind in ("Inh", "Prm", "Eff", "Amb")),
        *("NoNewPrivs: 1", "Seccomp: 2", "EINVAL", "EPERM"),
    ]


def test_19_settings_of_the_kernel(sandbox):
    """Root outside owns these files, and root may run the trainer."""
    paths = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches")
    code = f"for path in {paths!r}: attempt(lambda: open(path, 'w').close())"
    assert set(sandbox.run(tries(code)).split()) <= {"EROFS", "EACCES", "ENOENT"}


def test_20_large_interfaces_of_the_kernel(sandbox):
    numbers = (
        "{'x86_64': (321, 425, 323, 298, 250, 438), 'aarch64': (280, 425, 282, 241, 219, 438)}"
    )
    code = f"for number in {numbers}[os.uname().machine]: attempt(call, number, 0, 0, 0, 0, 0)"
    assert sandbox.run(tries(code)) == "EPERM\n" * 6


def test_21_characters_into_a_terminal(sandbox):
    code = (
        "attempt(open, '/dev/tty')\n"
        "leader, follower = os.openpty()\n"
        "attempt(fcntl.ioctl, follower, 0x5412, b'x')\n"
    )
    assert sandbox.run(tries(code)) == "ENXIO\nEPERM\n"


def test_22_files_and_environment_of_the_trainer(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_TEST_KEY", "secret")
    with open(tmp_path / "file", "w") as file:
        os.set_inheritable(file.fileno(), True)
        code = (
            "print('JRL_TEST_KEY' in os.environ)\n"
            "print(b'secret' in open('/proc/self/environ', 'rb').read())\n"
            "print(sorted(int(name) for name in os.listdir('/proc/self/fd'))[:-1])\n"
        )
        assert sandbox.run(tries(code)) == "False\nFalse\n[0, 1, 2]\n"


def test_23_output_without_end(mark):
    sandbox = Sandbox(seconds=20, output=50)
    before = time.monotonic()
    said = sandbox.run(spawning(mark) + "while True: print('y' * 1000)")
    assert said == "y" * 50 + "\n(cut: more was printed)"
    assert time.monotonic() - before < 8
    assert processes_with(mark) == []


@pytest.mark.parametrize("status", [113, 125, 126, 127, 137, 255])
def test_24_an_exit_status_that_means_something_elsewhere(sandbox, status):
    code = "import os, sys; print('status 0', file=sys.stderr, flush=True)\nos._exit(STATUS)"
    said = sandbox.run(code.replace("STATUS", str(status)))
    assert said == f"status 0\n\n(ended with status {status})"


def test_25_an_interrupt_of_the_trainer(mark):
    """Ctrl-C while code runs: the code ends before the interrupt propagates."""

    def interrupted(number, frame):
        raise KeyboardInterrupt

    sandbox = Sandbox(seconds=LONG)
    before = signal.signal(signal.SIGUSR1, interrupted)
    stop = threading.Event()

    def interrupt():
        while not processes_with(mark) and not stop.wait(0.01):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sandbox.run(spawning(mark) + f"import time; time.sleep({LONG})")
        assert processes_with(mark) == []
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


CALLER = """import os, sys, threading, time
from jrl.tasks.sandbox.sandbox import Sandbox

def fork():
    if sys.stdin.readline() and not os.fork():
        print("forked", flush=True)
        time.sleep(600)

threading.Thread(target=fork, daemon=True).start()
Sandbox(seconds=600).run(os.environ["CODE"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True], ids=["alone", "beside a child"])
def test_26_a_trainer_that_is_killed(mark, held):
    """Nothing of the code is left after `kill -9`, even if a forked child of the trainer has
    inherited all that it had open."""
    code = spawning(mark) + f"import time; time.sleep({LONG})"
    caller = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CALLER],
        env={**os.environ, "CODE": code},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        wait_until(lambda: processes_with(mark), "the code does not start")
        if held:
            caller.stdin.write(b"now\n")
            caller.stdin.flush()
            assert caller.stdout.readline() == b"forked\n"
        caller.kill()
        caller.wait()
        wait_until(lambda: not processes_with(mark), "the code goes on")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(caller.pid, signal.SIGKILL)
        caller.stdin.close()
        caller.stdout.close()
