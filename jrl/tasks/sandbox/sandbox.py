"""Sandbox that runs Python code, returns its output, and ends all its processes."""

import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from jrl.tasks.sandbox import cgroups
from jrl.tasks.sandbox.bubblewrap import HOME, INIT, INIT_INSIDE, NoSandbox, bubblewrap

MEGABYTE = 2**20
MAX_FILE_MB = 16
MAX_FILES = 10_000
STARTUP_SECONDS = 10.0
"""Time limit in seconds for an interpreter to start, or to end, on a busy machine. The time limit
of the code itself is enforced within the sandbox."""
COUNTS_IN_NAMESPACES = (5, 14)
"""First version of Linux whose process limit is per user namespace instead of per user."""
UNSAFE = "JRL_UNSAFE_TOOLS"
"""Environment variable that `--unsafe-tools` sets, and that worker processes inherit."""


def allow_unsafe() -> None:
    """Allows code to run unconfined on a machine that has no sandbox, in this process and in all
    that it starts."""
    os.environ[UNSAFE] = "1"


@dataclass(frozen=True)
class Sandbox:
    """Sandbox for Python code, with its resource limits.

    Raises:
      ValueError: for an invalid limit, and if this machine cannot confine code
        (`jrl.tasks.sandbox.bubblewrap.NoSandbox`) and running unconfined is not allowed.

    Attributes:
      seconds: wall-clock time, and processor time.
      memory_mb: memory of all its processes together.
      output: maximum number of characters returned; longer output is cut, with a notice.
      network: whether it has the host's network.
      processes: number of processes and threads at a time.
      unsafe: whether it may run as your user, with resource limits only, on a machine that cannot
        confine it; `--unsafe-tools` allows it for all sandboxes of a run.
    """

    seconds: float | int = 3.0
    memory_mb: int = 512
    output: int = 2000
    network: bool = False
    processes: int = 64
    unsafe: bool = False

    def __post_init__(self):
        for name in ("seconds", "memory_mb", "output", "processes"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} of a sandbox must be above 0.")
        if not self._may_be_unsafe():
            bubblewrap()

    def run(self, code: str) -> str:
        """Runs code; returns its output, errors included, and the reason if it did not end
        normally.

        All of its processes have ended when this returns or raises.

        Raises:
          ValueError: if the sandbox cannot be created any more.
        """
        with self._open_command() as (command, cwd, descriptors, group):
            ended = self._run_process(command, cwd, descriptors, code.encode("utf-8", "replace"))
            out_of_memory = group is not None and group.ran_out()
        text = ended.printed.decode("utf-8", "replace")
        text = text if cwd is None else text.replace(cwd, ".")
        if len(text) > self.output:
            text = text[: self.output] + "\n(cut: more was printed)"
        if out_of_memory:
            ending = f"stopped: more than {self.memory_mb} MB of memory"
        elif ended.complete:
            ending = _describe_end(ended.report)
        else:
            ending = f"stopped after {self.seconds:g} seconds" if ended.late else ""
        if not ending:
            return text
        return f"{text}\n({ending})" if text else f"({ending})"

    def _may_be_unsafe(self) -> bool:
        return self.unsafe or os.environ.get(UNSAFE) == "1"

    def _limits(self, *, namespaced: bool) -> list[str]:
        """Arguments of the init process."""
        numbers = {
            "seconds": self.seconds,
            "memory": self.memory_mb * MEGABYTE,
            "file": MAX_FILE_MB * MEGABYTE,
            "files": MAX_FILES,
            "processes": self.processes,
            "namespaced": int(namespaced),
            "count_processes": int(namespaced and _kernel_version() >= COUNTS_IN_NAMESPACES),
        }
        return [f"{name}={number}" for name, number in numbers.items()]

    def _run_process(
        self, command: Sequence[str], cwd: str | None, descriptors: Sequence[int], code: bytes
    ) -> "_Outcome":
        """Runs the init process to its end, its time limit, or its maximum output."""
        environment = {
            "PATH": os.defpath,
            "HOME": cwd or HOME,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            # Stack and heap of each thread count as memory.
            "MALLOC_ARENA_MAX": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with tempfile.TemporaryFile() as file:
            file.write(code)
            file.flush()
            process = subprocess.Popen(
                [*command, str(file.fileno()), *self._limits(namespaced=cwd is None)],
                # Kept open without writing: the init process ends when this process does, in any
                # way.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd or "/",
                env=environment,
                pass_fds=[*descriptors, file.fileno()],
                start_new_session=True,
            )
            try:
                end = time.monotonic() + self.seconds + 2 * STARTUP_SECONDS
                # A character has four bytes at most.
                return _read(process, end, max_bytes=4 * self.output + 4)
            finally:  # where the wait was interrupted as well
                _end(process)

    @contextmanager
    def _open_command(
        self,
    ) -> Iterator[tuple[list[str], str | None, list[int], cgroups.Group | None]]:
        """Command of the init process; its working folder if there is no sandbox; the descriptors
        that it inherits; and the control groups that it runs in."""
        interpreter = [sys.executable, "-P", "-s", "-B"]
        try:
            program = bubblewrap()
        except NoSandbox:
            if not self._may_be_unsafe():
                raise
            with tempfile.TemporaryDirectory(
                prefix="jrl-unsafe-", ignore_cleanup_errors=True
            ) as folder:
                yield [*interpreter, str(INIT)], folder, [], None
            return
        with program.command(network=self.network) as (command, descriptors):
            group = cgroups.create_group(self.memory_mb * MEGABYTE, self.processes)
            try:
                joined = [] if group is None else group.command
                yield [*joined, *command, *interpreter, INIT_INSIDE], None, descriptors, group
            finally:
                if group is not None:
                    group.remove()


class _Outcome(NamedTuple):
    """Output of the code, report of the init process on its standard error, whether the report is
    complete, and whether the process was out of time."""

    printed: bytes
    report: str
    complete: bool
    late: bool


def _read(process: "subprocess.Popen[bytes]", end: float, max_bytes: int) -> _Outcome:
    """Reads both outputs until the init process closes its own, or the output is at its maximum."""
    assert process.stdout is not None and process.stderr is not None
    printed, report, complete, late = bytearray(), bytearray(), False, False
    with selectors.DefaultSelector() as selector:
        for stream, into in ((process.stdout, printed), (process.stderr, report)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, into)
        while not complete and len(printed) < max_bytes:
            left = end - time.monotonic()
            events = selector.select(left) if left > 0 else []
            if not events:
                late = True
                break
            for key, _ in events:
                part = os.read(key.fd, min(65536, max_bytes))
                key.data.extend(part)
                if not part:
                    selector.unregister(key.fileobj)
                    # Not by the code's output, which its child processes may hold open.
                    complete |= key.fileobj is process.stderr
    if complete:
        while len(printed) < max_bytes and (part := _ready(process.stdout.fileno())):
            printed += part
    text = report.decode("utf-8", "replace")
    return _Outcome(bytes(printed[:max_bytes]), text, complete, late)


def _describe_end(report: str) -> str:
    """Reason for an abnormal end, from the report of the init process; empty for a normal end."""
    last_line = report.strip().splitlines()[-1:]
    if last_line == ["status 0"]:
        return ""
    if last_line and last_line[0].startswith(("status ", "stopped")):
        return last_line[0].replace("status", "ended with status")
    raise NoSandbox(f"the sandbox of a policy's code has failed: {report.strip()[-300:]}")


def _ready(descriptor: int) -> bytes:
    """Bytes that can be read without waiting."""
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the init process and all that it started, and waits until they have ended."""
    assert process.stdin and process.stdout and process.stderr
    process.stdin.close()  # upon which it exits
    try:
        process.wait(STARTUP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()  # the kernel kills the init process with it
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _kernel_version() -> tuple[int, ...]:
    """The version of the kernel; empty if it cannot be parsed."""
    numbers = os.uname().release.split("-")[0].split(".")[:2]
    return tuple(map(int, numbers)) if all(map(str.isdigit, numbers)) else ()
