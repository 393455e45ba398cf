"""HTTP server of the application on a port, and the connections of its clients.

uvicorn bounds neither the time of a request's head nor the number of connections. Its
`limit_concurrency` counts them too, but rejects requests, so that idle connections up to the limit
would have every request rejected.
"""

import asyncio
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jrl.processes.stopping import Stop
from jrl.serving.api.fields import one_line
from jrl.serving.application import FrontEnd
from jrl.serving.service import Service

HEAD_SECONDS = 10.0
"""Timeout of a request's head, from the start of its connection."""
KEEP_ALIVE = 30
"""Seconds that a connection waits for a further request."""
DELIVERY_SECONDS = 60.0
"""Timeout in which a client takes the rest of a complete response."""
CHECK_SECONDS = 1.0
"""Seconds between two checks for connections past their timeout."""
EXTRA_CONNECTIONS = 128
"""Connections in addition to one for each running and queued choice."""
RESERVED_FILES = 64
"""Open files that are reserved for other uses: checkpoints being loaded, and connections that are
accepted before others are closed."""
FULL_MESSAGE = b"all connections of this server are in use: try again later.\n"
POLL_SECONDS = 0.1
"""Seconds between two checks for a request to end the server."""
LAST_DELIVERY_SECONDS = 5
"""Seconds after the end of the engine in which clients may take the rest of their responses, and as
many again for what the operating system still buffers of these."""
BACKLOG = 1024
"""Connections that the operating system queues until they are accepted."""
FOLLOW_SECONDS = 2.0
"""Seconds between two polls for a later policy."""


class Connection(H11Protocol):
    """Connection that is counted, and that may be dropped while idle (`Connections`)."""

    connections_of_server: ClassVar["Connections"]

    def connection_made(  # pyright: ignore[reportIncompatibleMethodOverride] (as uvicorn's)
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self.since: float = self.loop.time()
        self.connections_of_server.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.connections_of_server.leave(self)

    def on_response_complete(self) -> None:
        # Before uvicorn's own code, which may start the next request immediately.
        self.since = self.loop.time()
        super().on_response_complete()

    @property
    def is_idle(self) -> bool:
        """True if no complete request awaits its response, and no response is being sent."""
        if self._is_between:
            return not self.transport.get_write_buffer_size()
        return self.cycle.more_body

    def has_expired(self, now: float) -> bool:
        """True if a head, a further request, or taking a response has timed out.

        Bodies have a timeout of their own (`jrl.serving.application`).
        """
        if not self._is_between:
            return False
        if self.transport.get_write_buffer_size():
            allowed = DELIVERY_SECONDS
        # After a response, the rest of an unread body may continue without end.
        elif self.cycle is None or self.cycle.more_body:
            allowed = HEAD_SECONDS
        else:
            allowed = KEEP_ALIVE + HEAD_SECONDS
        return now - self.since > allowed

    @property
    def _is_between(self) -> bool:
        """True if no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    def drop(self) -> None:
        """Closes it immediately."""
        self.connections_of_server.leave(self)
        self.transport.abort()

    def reject(self) -> None:
        """Closes it with the status 503."""
        self.connections_of_server.leave(self)
        head = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
        size = b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(FULL_MESSAGE)
        self.transport.write(head + size + FULL_MESSAGE)
        self.transport.close()


class Connections:
    """All connections of a server.

    If there are more than `max_connections`, the connection that has been idle for the longest is
    dropped; if all are being served, the new one is rejected. So a client that sends its request
    immediately is served, however many idle connections there are.
    """

    def __init__(self, max_connections: int):
        self.max_connections = max_connections
        self._open: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def protocol(self) -> type[Connection]:
        """Protocol class that uvicorn instantiates for each connection."""
        return type("CountedConnection", (Connection,), {"connections_of_server": self})

    def enter(self, new: Connection) -> None:
        """Counts a connection; over the limit it drops the oldest idle one or rejects this one."""
        self._open.add(new)
        if len(self._open) <= self.max_connections:
            return
        idle = (each for each in self._open if each is not new and each.is_idle)
        oldest = min(idle, key=lambda connection: connection.since, default=None)
        if oldest is None:
            new.reject()
        else:
            oldest.drop()

    def leave(self, connection: Connection) -> None:
        """Removes a connection that has ended; repeated calls do no harm."""
        self._open.discard(connection)

    async def watch(self) -> None:
        """Drops connections past their timeout, until this is cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = asyncio.get_running_loop().time()
            for connection in [each for each in self._open if each.has_expired(now)]:
                connection.drop()


def limit_connections(requested: int | None, choices: int) -> tuple[int, str]:
    """Limit of a server's connections, with a note if the limit of open files lowers it.

    Args:
      requested: connections; None is one for each choice, plus `EXTRA_CONNECTIONS`.
      choices: most choices that may run or be queued, in total.

    Raises:
      ValueError: if the limit of open files is too low for `requested` connections, or for any.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    default = choices + EXTRA_CONNECTIONS if requested is None else requested
    if limit == resource.RLIM_INFINITY:
        return default, ""
    available = limit - len(os.listdir("/dev/fd")) - RESERVED_FILES
    if available < 1 or (requested is not None and requested > available):
        subject = "a connection" if requested is None else f"connections={requested}"
        raise ValueError(
            f"{subject} and all else need more than the {limit} files that this process may have "
            f"open, which leave {max(available, 0)} for connections: raise the limit with ulimit "
            "-n, or lower --connections."
        )
    if available >= default:
        return default, ""
    return available, (
        f"connections: {available}, as the limit of {limit} open files (ulimit -n) does not allow "
        f"{default}"
    )


class EngineFailed(RuntimeError):
    """Error: the engine's thread has ended by an exception."""


class _Server(uvicorn.Server):
    """uvicorn server that leaves signals to `Stop`."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio uses the number of connections that it accepts at a time as the listen backlog.
        for listener in sockets or []:
            listener.listen(BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket, which queues connections from now on; port 0 takes a free one.

    Raises:
      ValueError: if the port is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"host={host} port={port} is not available ({error.strerror}): choose another --port, "
            "or an address of this machine as --host."
        ) from error
    listener.listen(BACKLOG)
    return listener


def check_private(host: str, listening: socket.socket) -> None:
    """Raises ValueError unless an address is loopback, which only this machine can reach."""
    address = ip_address(listening.getsockname()[0])
    if not address.is_loopback:
        raise ValueError(
            f"host={host} can be reached by other machines, and no key is required: give "
            "--api-key, or --allow-anyone to serve every client."
        )


def run(
    service: Service,
    front: FrontEnd,
    listening: socket.socket,
    *,
    follow: bool,
    connections: int,
) -> None:
    """Serves until Ctrl-C or SIGTERM; then rejects new requests and finishes running ones.

    Args:
      listening: socket from `listen`.
      follow: true loads later policies as they appear.
      connections: most connections of clients at a time.

    Raises:
      EngineFailed: when the engine has ended by an error.
    """
    with Stop() as stop:
        stop.doing = "accepting no more requests and finishing those in flight"
        asyncio.run(serve(service, front, listening, stop, follow, connections))
    if service.failure is not None:
        raise EngineFailed(f"the engine has failed: {service.failure!r}") from service.failure


async def serve(
    service: Service,
    front: FrontEnd,
    listening: socket.socket,
    stop: Stop,
    follow: bool,
    max_connections: int,
) -> None:
    """Serves until `stop` is true and running requests are finished; arguments as for `run`."""
    connections = Connections(max_connections)
    config = uvicorn.Config(
        front.application(),
        http=connections.protocol,
        access_log=False,
        timeout_graceful_shutdown=LAST_DELIVERY_SECONDS,
        timeout_keep_alive=KEEP_ALIVE,
        # Connections accepted at a time, before those over the limit can be closed.
        backlog=RESERVED_FILES // 4,
        h11_max_incomplete_event_size=2**14,
        ws="none",
        # Invalid requests of unknown clients are not worth a line of log.
        log_level="error",
    )
    server = _Server(config)
    background = [connections.watch(), _stop_when_done(server, service, front, stop)]
    if follow:
        background.append(_follow(service))
    tasks = [asyncio.create_task(each) for each in background]
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in tasks:
            task.cancel()


async def _stop_when_done(
    server: uvicorn.Server, service: Service, front: FrontEnd, stop: Stop
) -> None:
    while not stop and service.failure is None:
        await asyncio.sleep(POLL_SECONDS)
    service.close()
    while not service.ended:
        await asyncio.sleep(POLL_SECONDS)
    front.end(LAST_DELIVERY_SECONDS)
    while front.num_open:
        await asyncio.sleep(POLL_SECONDS)
    server.should_exit = True


async def _follow(service: Service) -> None:
    rejected, printed = None, ""
    while not service.closing:
        await asyncio.sleep(FOLLOW_SECONDS)
        newest = None
        try:
            newest = await asyncio.to_thread(lambda: service.newest)
            if newest is None or newest in (service.version, rejected) or service.closing:
                continue
            version = await asyncio.wrap_future(service.load())
            line = f"serving step {version}"
        except Exception as error:  # any library's error: serving continues with the current policy
            rejected = newest
            subject = "a later step" if newest is None else f"step {newest}"
            line = f"warning: {subject} is not served: {one_line(error)}"
        if line != printed:
            printed = line
            print(line, file=sys.stderr, flush=True)
