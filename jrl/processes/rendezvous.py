"""Rendezvous of the processes of a run at the coordinator's address, before JAX connects them.

JAX waits minutes for a process that was started with other numbers, or that has died, and then
names none. Here every process says which it is: wrong numbers end all processes immediately, and
all of them with the same line.
"""

import contextlib
import json
import selectors
import socket
import time
from typing import Any

RETRY_SECONDS = 0.2
"""Seconds between two attempts to reach the coordinator."""
REPLY_SECONDS = 10.0
"""Seconds in which process 0 has to reach itself, and a process to say which it is."""
MAX_BYTES = 4096
GREETING = "jrl"
SELF = "self"
"""Message of process 0 to itself."""


def host(address: tuple[str, int], name: str, count: int, seconds: float) -> None:
    """Waits in process 0 for the other processes, and tells them whether the run can start.

    Args:
      address: host and port of the coordinator.
      name: the address as the user wrote it, for messages.
      count: processes of the run.
      seconds: maximum wait.

    Raises:
      ValueError: if this machine does not have the address or the port is taken; if a process has
        another count or the index of another, or ends; if one does not come in time.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", address[1]), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise ValueError(
            f"coordinator={name!r}: process 0 cannot listen there ({error.strerror}): choose "
            "another port."
        ) from error
    with server:
        _Host(server, address, name, count).wait(seconds)


def join(address: tuple[str, int], name: str, count: int, index: int, seconds: float) -> None:
    """Says to process 0 which process this is, and waits until all are there.

    Args:
      address, name, count: as of `host`.
      index: index of this process.
      seconds: maximum wait for process 0 to listen, and then for the others.

    Raises:
      ValueError: where process 0 does not answer in time, or says that the run cannot start.
    """
    with _connect(address, name, seconds) as connection:
        _send(connection, {GREETING: index, "count": count})
        connection.settimeout(seconds + REPLY_SECONDS)
        reply = _receive(connection)
    if reply is None:
        raise ValueError(
            f"coordinator={name!r}: process 0 has ended while the processes started: read its "
            "output."
        )
    if reply["error"] is not None:
        raise ValueError(reply["error"])


class _Host:
    """Process 0's side: connections of the others, by their indices."""

    def __init__(self, server: socket.socket, address: tuple[str, int], name: str, count: int):
        self._server, self._address, self._name, self._count = server, address, name, count
        self._selector = selectors.DefaultSelector()
        self._strangers: set[socket.socket] = set()
        self._members: dict[int, socket.socket] = {}
        self._has_reached_itself = False

    def wait(self, seconds: float) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        begun = time.monotonic()
        try:
            self._reach_itself()
            while len(self._members) < self._count - 1:
                if time.monotonic() > begun + seconds:
                    raise ValueError(self._missing(seconds))
                self._poll()
        except ValueError as error:
            self._reply(str(error))
            raise
        else:
            self._reply(None)
        finally:
            self._selector.close()
            for connection in (*self._strangers, *self._members.values()):
                connection.close()

    def _reach_itself(self) -> None:
        """Checks the coordinator's address, to which JAX connects in this process too."""
        deadline = time.monotonic() + REPLY_SECONDS
        reason = "something else listens there"
        try:
            with socket.create_connection(self._address, timeout=REPLY_SECONDS) as connection:
                _send(connection, {GREETING: SELF, "count": self._count})
                while not self._has_reached_itself and time.monotonic() < deadline:
                    self._poll()
        except OSError as error:
            reason = str(error.strerror or error)
        if not self._has_reached_itself:
            raise ValueError(
                f"coordinator={self._name!r}: process 0 does not reach itself there ({reason}): "
                "give the address of its own machine."
            )

    def _missing(self, seconds: float) -> str:
        missing = [str(n) for n in range(1, self._count) if n not in self._members]
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" * (len(missing) > 8))
        return (
            f"coordinator={self._name!r}: not all of {self._count} processes connected within "
            f"{seconds:g} s: missing is --process-id {shown}; start them, or raise "
            "--coordinator-timeout."
        )

    def _poll(self) -> None:
        """Reads what has come, and waits at most `RETRY_SECONDS` for something."""
        for key, _ in self._selector.select(RETRY_SECONDS):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                connection.settimeout(REPLY_SECONDS)
                self._strangers.add(connection)
                self._selector.register(connection, selectors.EVENT_READ)
                continue
            assert isinstance(key.fileobj, socket.socket)
            self._selector.unregister(key.fileobj)
            self._read(key.fileobj)

    def _read(self, connection: socket.socket) -> None:
        for index, member in self._members.items():
            if member is connection:  # it says nothing more: this is its end
                raise ValueError(
                    f"process {index} has ended while the processes started: read its output."
                )
        self._strangers.discard(connection)
        greeting = _receive(connection)
        if greeting is None:  # of something else, for example a scan of ports
            connection.close()
            return
        index, count = greeting[GREETING], greeting.get("count")
        if index == SELF:
            self._has_reached_itself = True
            connection.close()
            return
        is_doubled = index in self._members or index == 0
        # One that may not join gets the reply, too.
        self._members[self._count + len(self._members) if is_doubled else index] = connection
        if count != self._count:
            raise ValueError(
                f"process {index} was started with --num-processes {count}, and process 0 with "
                f"{self._count}: give all the same."
            )
        if is_doubled:
            raise ValueError(
                f"two processes were started with --process-id {index}: give each its own."
            )
        self._selector.register(connection, selectors.EVENT_READ)

    def _reply(self, error: str | None) -> None:
        for connection in self._members.values():
            with contextlib.suppress(OSError):  # it has ended
                _send(connection, {GREETING: 0, "error": error})


def _connect(address: tuple[str, int], name: str, seconds: float) -> socket.socket:
    """Connects to process 0 once it listens."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, timeout=min(seconds, REPLY_SECONDS))
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"coordinator={name!r} does not answer within {seconds:g} s ({error}): start "
                    "process 0 on that host, with the same --coordinator."
                ) from error
            time.sleep(RETRY_SECONDS)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The other side's message; None if it sends none, or is no process of a run."""
    content = b""
    try:
        while not content.endswith(b"\n") and len(content) < MAX_BYTES:
            received = connection.recv(MAX_BYTES)
            if not received:
                return None
            content += received
        message = json.loads(content)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) and GREETING in message else None
