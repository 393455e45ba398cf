"""Launch over ssh: one process of the run on each host, all of which end when one fails.

A run that is drained (`jrl.faults.guard`) is started again without the host of the alarm. Nothing
else is restarted.
"""

import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from jrl.faults.guard import Drain, read_drains
from jrl.launch.program import MODULE, Program
from jrl.processes.stopping import DRAINED, INTERRUPTED

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""Without passwords, and with an end when a host does not answer for a minute."""
CONNECTION_FAILED = 255
"""Exit status of ssh if it does not connect."""
KILLED = 128 + signal.SIGKILL
"""Exit status of a process that a second signal killed."""
KILL_SECONDS = 60
"""Seconds that a process may save after SIGTERM, before it is killed; also those that the others
may take to end by themselves once one has ended with `DRAINED`."""
RECORD_SECONDS = 60.0
"""Seconds until a file of another host is seen on a shared file system, whose clients cache it."""


@dataclass(frozen=True)
class Hosts:
    """Hosts of a run.

    Attributes:
      names: as ssh takes them, [USER@]HOST; process 0 runs on the first.
      port: port of the coordinator, on the first host.
      environment: variables of the processes.
    """

    names: tuple[str, ...]
    port: int = 7733
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def coordinator(self) -> str:
        """Address of process 0."""
        host = self.names[0].rpartition("@")[2]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def parse_hosts(text: str) -> tuple[str, ...]:
    """Host names from a list with commas, for example node0,node1; ValueError if one is
    empty, or an option of ssh."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name or name.startswith("-") or any(c.isspace() for c in name):
            raise ValueError(f"hosts={text!r} must be names with commas between: a,b,c.")
    return names


def remote_command(program: Program, hosts: Hosts, process: int) -> str:
    """Shell command of a process on its host.

    The program gets SIGTERM, after which it saves, when the command's standard input ends: it
    does at the launcher's end, however that ends, where ssh itself would leave it running.
    """
    words = [
        *("env", *(f"{name}={value}" for name, value in hosts.environment.items())),
        *(sys.executable, "-m", MODULE, *program.arguments),
        *("--coordinator", hosts.coordinator),
        *("--num-processes", str(len(hosts.names)), "--process-id", str(process)),
    ]
    directory = shlex.quote(str(Path.cwd()))
    script = (
        f"cd {directory} || exit 2; exec 3<&0; {shlex.join(words)} </dev/null 3<&- & child=$!; "
        "{ cat <&3; kill -TERM $child; "
        f"sleep {KILL_SECONDS}; kill -KILL $child; }} >/dev/null 2>&1 & "
        "watcher=$!; wait $child; status=$?; kill $watcher 2>/dev/null; exit $status"
    )
    return f"exec sh -c {shlex.quote(script)}"


def launch(program: Program, hosts: Hosts) -> int:
    """Runs the program on all hosts, and returns the exit status.

    It is 0 if all processes end with 0, 130 if Ctrl-C ended them, and otherwise the status of the
    first that failed. Lines
    are printed with the name of their host. A run that drained one of its hosts is started again on
    the others, with the layout that it chose for them.
    """
    while True:
        drains = len(read_drains(program.run_dir))
        status, interrupted = _run(program, hosts)
        if status != DRAINED or interrupted:
            return status
        drain = _wait_for_drain(program.run_dir, drains)
        if drain is None or drain.restart is None:
            return status
        names = tuple(hosts.names[process] for process in drain.restart.processes)
        print(
            f"{hosts.names[drain.process]} is drained: the run continues after step {drain.step} "
            f"on {', '.join(names)} with layout {drain.restart.layout!r}",
            flush=True,
        )
        hosts = replace(hosts, names=names)
        program = replace(program, arguments=(*program.arguments, *drain.restart.flags))


def _run(program: Program, hosts: Hosts) -> tuple[int, bool]:
    """Exit status of the program on all hosts, and whether a signal ended it."""
    run = _Processes(hosts)
    previous = {n: signal.signal(n, run.interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        run.start([remote_command(program, hosts, n) for n in range(len(hosts.names))])
        status = run.wait()
        by_person = run.interrupted and status in (0, KILLED)
        return INTERRUPTED if by_person else status, run.interrupts > 0
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        run.close()


def _wait_for_drain(run_dir: Path, num_before: int) -> Drain | None:
    """The newest drain of a run, once it has more than `num_before`; None if none comes."""
    deadline = time.monotonic() + RECORD_SECONDS
    while len(drains := read_drains(run_dir)) <= num_before:
        if time.monotonic() > deadline:
            print(f"error: {run_dir} has no record of the drain", file=sys.stderr, flush=True)
            return None
        time.sleep(0.5)
    return drains[-1]


class _Processes:
    """Processes of ssh, one for each host."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Lock()
        self._status: int | None = None
        self.interrupts, self.interrupted = 0, False

    def start(self, commands: Sequence[str]) -> None:
        for name, command in zip(self._hosts.names, commands, strict=True):
            process = subprocess.Popen(
                [*SSH, name, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,  # a Ctrl-C in the terminal is the launcher's to pass on
            )
            self._processes.append(process)
            printers = [
                _start_thread(_copy_lines, name, process.stdout, sys.stdout),
                _start_thread(_copy_lines, name, process.stderr, sys.stderr),
            ]
            self._threads.append(_start_thread(self._watch, name, process, printers))

    def wait(self) -> int:
        """Waits for all processes; returns 0, or the status of the first that failed."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(1.0)  # a signal's handler runs in between
        return self._status or 0

    def interrupt(self, signum: int, frame: object) -> None:
        """Asks all processes to save and end; at the second signal, ends them immediately."""
        self.interrupts += 1
        self.interrupted |= signum == signal.SIGINT
        if self.interrupts == 1:
            self._close_inputs()
        else:
            self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def close(self) -> None:
        """Ends all processes that have not ended."""
        self.kill()
        for process in self._processes:
            with process:  # waits, and closes its files
                pass

    def _watch(
        self, name: str, process: subprocess.Popen[bytes], printers: Sequence[threading.Thread]
    ) -> None:
        status = process.wait()
        for printer in printers:
            printer.join()
        if status == 0:
            return
        with self._ended:
            if self._status is not None:
                return
            self._status = status if status > 0 else 128 - status
        if status == DRAINED:
            # The others end by themselves, with the same status.
            timer = threading.Timer(KILL_SECONDS, self._close_inputs)
            timer.daemon = True
            timer.start()
            return
        reason = f"ended with status {self._status}"
        if status == CONNECTION_FAILED:
            reason = "cannot be reached by ssh, or the connection was lost"
        print(f"error: {name} {reason}; ending the others", file=sys.stderr, flush=True)
        self._close_inputs()

    def _close_inputs(self) -> None:
        for process in self._processes:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()


def _start_thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _copy_lines(name: str, source: IO[bytes], destination: IO[str]) -> None:
    """Copies lines, each with the name of the host before it."""
    for line in source:
        text = line.decode(errors="replace").rstrip("\r\n")
        # One write for each line, so that lines of two hosts do not mix.
        destination.write(f"{name}: {text}\n")
        destination.flush()
