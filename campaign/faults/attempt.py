"""Attempt of a run: all its processes, from their start to their end."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaign.faults.program import EVENTS

ROOT = Path(__file__).parents[2]
BY_JAX = "Terminating process because the JAX distributed service detected fatal errors"
"""Line of JAX, which ends a process when it notices the end of process 0 before Gloo does."""
OURS = ("error: ", "warning: ", "process ", "Traceback")
"""Beginnings of lines of jrl's own; Gloo, XLA and JAX print others."""


@dataclass(frozen=True)
class Event:
    """Announcement of a process (`campaign.faults.program`), at a monotonic time."""

    time: float
    process: int
    phase: str
    step: int


@dataclass(frozen=True)
class End:
    """End of a process.

    Attributes:
      status: its exit status, negative for a signal.
      lines: what jrl printed on standard error, and `BY_JAX`.
      by_itself: false if it was killed because it did not end.
    """

    status: int
    lines: tuple[str, ...]
    by_itself: bool

    @property
    def errors(self) -> list[str]:
        return [line for line in self.lines if line.startswith("error: ")]

    @property
    def is_by_jax(self) -> bool:
        """True if JAX ended it with a line of its own, and SIGABRT."""
        return self.status == -signal.SIGABRT and any(BY_JAX in line for line in self.lines)


@dataclass(frozen=True)
class Host:
    """Machine of a process: what its command begins with, and the address of process 0 there."""

    prefix: tuple[str, ...] = ()
    coordinator: str = "localhost"


class Attempt:
    """Processes of a run that are started together.

    Args:
      hosts: of the processes.
      flags: of all of them.
      output: file name without its end for what they print.
      cache: folder of compiled programs.
    """

    def __init__(self, hosts: Sequence[Host], flags: Sequence[str], output: Path, cache: Path):
        from tests.support.compiling import FLAGS

        self.begun = time.monotonic()
        self.events: list[Event] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.struck: set[int] = set()
        self._news, self._listening = threading.Condition(), len(hosts)
        self._outputs = [Path(f"{output}-{number}.txt") for number in range(len(hosts))]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join(FLAGS),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles what it imports
        port = free_port()
        for number, host in enumerate(hosts):
            command = [*host.prefix, sys.executable, "-m", "campaign.faults.program", *flags]
            if len(hosts) > 1:
                command += [f"--coordinator={host.coordinator}:{port}", f"--process-id={number}"]
                command += [f"--num-processes={len(hosts)}"]
            reads, writes = os.pipe()
            with self._outputs[number].open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment | {EVENTS: str(writes)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=file,
                    pass_fds=[writes],
                    start_new_session=True,
                )
            os.close(writes)
            self.processes.append(process)
            threading.Thread(target=self._listen, args=(number, reads), daemon=True).start()

    def _listen(self, number: int, descriptor: int) -> None:
        with os.fdopen(descriptor) as lines:
            for line in lines:
                if not line.endswith("\n"):  # of a process that was killed in it
                    break
                moment, phase, step = line.split("\t")
                with self._news:
                    self.events.append(Event(float(moment), number, phase, int(step)))
                    self._news.notify_all()
        with self._news:
            self._listening -= 1
            self._news.notify_all()

    def wait_for(self, wanted: Callable[[Event], bool], seconds: float) -> Event | None:
        """First event that is wanted; None if all processes end before it, or in time."""
        looked, end = 0, time.monotonic() + seconds
        while True:
            # Before the events: those of a process that has ended are all there soon after.
            is_last = time.monotonic() > end or not self.is_running()
            with self._news:
                if is_last:
                    self._news.wait_for(lambda: self._listening == 0, 0.5)
                for event in self.events[looked:]:
                    if wanted(event):
                        return event
                looked = len(self.events)
                if is_last:
                    return None
                self._news.wait(0.05)

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def signal(self, number: int, kind: signal.Signals) -> None:
        """Sends a signal to a process, which is not expected to end by itself."""
        self.struck.add(number)
        self.processes[number].send_signal(kind)

    def order(self, number: int, line: str) -> None:
        """Sends an order to a process."""
        pipe = self.processes[number].stdin
        assert pipe is not None
        pipe.write(f"{line}\n".encode())
        pipe.flush()

    def wait(self, seconds: float, but: int | None = None) -> None:
        """Returns when all processes but one have ended, or after so many seconds."""
        end = time.monotonic() + seconds
        others = [process for number, process in enumerate(self.processes) if number != but]
        while any(each.poll() is None for each in others) and time.monotonic() < end:
            time.sleep(0.02)

    def end(self, seconds: float) -> list[End]:
        """Ends of all processes: of those that do not end in time, by SIGKILL."""
        self.wait(seconds)
        alone, struck = [process.poll() is not None for process in self.processes], {*self.struck}
        self.kill()
        self.struck = struck
        return [
            End(process.returncode, own_lines(path), by_itself)
            for process, path, by_itself in zip(self.processes, self._outputs, alone, strict=True)
        ]

    def kill(self) -> None:
        """Ends all processes at once, as a machine that loses its power."""
        for number, process in enumerate(self.processes):
            self.struck.add(number)
            process.kill()
        for process in self.processes:
            process.communicate()


def own_lines(path: Path) -> tuple[str, ...]:
    lines = path.read_text(errors="replace").splitlines()
    return tuple(line for line in lines if line.startswith(OURS) or BY_JAX in line)


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
