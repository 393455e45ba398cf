"""End of a run: signals, and the supervisor that started it and restarts it after a failure.

After Ctrl-C, SIGTERM or the loss of its terminal a run finishes its current work, saves and ends. A
second Ctrl-C ends it immediately.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

GRACE_SECONDS = 3.0
"""Seconds that a second Ctrl-C gives the main thread, which may be in a long call of a library."""

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
DRAINED = 75
"""Exit status of a run that ended for a restart that leaves out a faulty machine (EX_TEMPFAIL of
sysexits.h). All of its processes have it."""
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended (128 + SIGINT)."""


class Stop:
    """Stop flag: true once the process was asked to end; the work in progress is finished first.

    A thread prints immediately what happens next: the main thread may be in a call of minutes,
    before whose end Python runs no handler. Outside of the main thread, where Python allows no
    handlers, no signal is handled. `cleanup` is called before the process is ended without its main
    thread.
    """

    def __init__(self, cleanup: Callable[[], None] = lambda: None):
        self.doing = "finishing work in flight"
        """Current work, as the message prints it; the loop updates it."""
        self._cleanup = cleanup
        self._received: list[int] = []
        self._previous_handlers: dict[int, Any] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._wakeup = -1
        self._terminals: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._received)

    @property
    def is_interrupted(self) -> bool:
        """True if a person pressed Ctrl-C, rather than a machine ending its programs."""
        return signal.SIGINT in self._received

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._sockets = local_socket, wakeup_socket = socket.socketpair()
        wakeup_socket.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(wakeup_socket.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=self._watch, args=(local_socket,), name="jrl signals", daemon=True
        ).start()
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        for signum in _NAMES:
            # One that is ignored, as Ctrl-C is in a shell's background job and SIGHUP by nohup,
            # stays so.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous_handlers[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        if self._sockets is None:
            return
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup)
        _, wakeup_socket = self._sockets
        wakeup_socket.close()  # the thread reads the end, and closes its side
        self._sockets = None

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        is_repeated = signum == signal.SIGINT and signum in self._received
        self._received.append(signum)
        if signum == signal.SIGHUP:
            self._discard_terminal()
        if is_repeated:
            raise KeyboardInterrupt

    def _discard_terminal(self) -> None:
        """Discards what is printed from here on: the terminal is closed, and every write fails."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(null, descriptor)
        os.close(null)

    def _watch(self, local_socket: socket.socket) -> None:
        """Prints a message for each signal, and ends the process at the second Ctrl-C."""
        interrupts = 0
        with local_socket:
            while content := local_socket.recv(64):
                for signum in content:
                    interrupts += signum == signal.SIGINT
                    if interrupts > 1:
                        self._exit_at_deadline(local_socket)
                    elif signum in _NAMES:
                        name, repetition = _NAMES[signal.Signals(signum)], "again " * interrupts
                        _print_line(f"{name}: {self.doing}; Ctrl-C {repetition}stops immediately")

    def _exit_at_deadline(self, local_socket: socket.socket) -> None:
        """Ends the process unless the main thread leaves the block in time."""
        local_socket.settimeout(GRACE_SECONDS)
        try:
            while local_socket.recv(64):
                pass
        except TimeoutError:
            _print_line("stopped immediately; what has been saved is kept")
            self._cleanup()
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h")  # a progress display has hidden the cursor
            os._exit(130)


def _print_line(line: str) -> None:
    with suppress(OSError):  # of a terminal that is closed
        print(line, file=sys.stderr, flush=True)


class Supervisor:
    """Supervisor that does nothing: of a run that a person started. Launchers derive theirs."""

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Is told of every step; may be a collective, as all processes of a run call it. True, the
        same in all of them, if this process may end soon, as its machine is taken back: the run
        then saves a checkpoint."""
        return False


UNSUPERVISED = Supervisor()
