"""Connections of clients: how many there may be, and how long one may take to ask for something.

uvicorn bounds neither the time of a request's head nor the number of connections: its
`limit_concurrency` counts them too, but refuses requests, so that a limit's worth of connections
that send nothing would turn away whoever asks.
"""

import asyncio
import os
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Within which the head of a request comes, from the beginning of its connection."""
KEEP_ALIVE = 30
"""Seconds that a connection waits for a further request."""
DELIVERY_SECONDS = 60.0
"""Within which a client takes the rest of an answer that is complete."""
LOOK = 1.0
"""Seconds between two looks at which connections have taken too long."""
BESIDE = 128
"""Connections beside those whose choices are written or wait for it."""
SPARE = 64
"""Open files that are left to all else: checkpoints that are loaded, and connections that are
accepted before others are closed."""
FULL = b"all connections of this server are in use: try again later.\n"


class Connection(H11Protocol):
    """One that counts, and that is dropped where it asks for nothing (`Connections`)."""

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
        # Before what may begin with the next request at once.
        self.since = self.loop.time()
        super().on_response_complete()

    @property
    def asks_for_nothing(self) -> bool:
        """Whether no request has come to its end that is not answered, and no answer is on its
        way."""
        if self._is_between:
            return not self.transport.get_write_buffer_size()
        return self.cycle.more_body

    def has_expired(self, now: float) -> bool:
        """Whether a head, a further request, or taking an answer took too long; bodies have a
        limit of their own (`jrl.serving.application`)."""
        if not self._is_between:
            return False
        if self.transport.get_write_buffer_size():
            allowed = DELIVERY_SECONDS
        # After the answer to a request whose body was not read the rest of it may come for ever.
        elif self.cycle is None or self.cycle.more_body:
            allowed = HEAD_SECONDS
        else:
            allowed = KEEP_ALIVE + HEAD_SECONDS
        return now - self.since > allowed

    @property
    def _is_between(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def drop(self) -> None:
        """Closes it at once."""
        self.connections_of_server.leave(self)
        self.transport.abort()

    def refuse(self) -> None:
        """Closes it with the status 503."""
        self.connections_of_server.leave(self)
        head = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
        size = b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(FULL)
        self.transport.write(head + size + FULL)
        self.transport.close()


class Connections:
    """All connections of a server.

    Where there are more than `most`, one that asks for nothing makes room, that which has done so
    for the longest; where all are being served, the new one is refused. So a client that asks at
    once is heard, however many others only hold connections.

    Args:
      most: connections at a time.
    """

    def __init__(self, most: int):
        self.most = most
        self._there: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._there)

    @property
    def protocol(self) -> type[Connection]:
        """What uvicorn makes for each connection."""
        return type("CountedConnection", (Connection,), {"connections_of_server": self})

    def enter(self, new: Connection) -> None:
        """Counts a connection, and makes room for it or refuses it."""
        self._there.add(new)
        if len(self._there) <= self.most:
            return
        idle = (each for each in self._there if each is not new and each.asks_for_nothing)
        oldest = min(idle, key=lambda each: each.since, default=None)
        if oldest is None:
            new.refuse()
        else:
            oldest.drop()

    def leave(self, connection: Connection) -> None:
        """A connection that has ended; more than once does no harm."""
        self._there.discard(connection)

    async def watch(self) -> None:
        """Drops what takes too long, until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            now = asyncio.get_running_loop().time()
            for each in [each for each in self._there if each.has_expired(now)]:
                each.drop()


def most_connections(wanted: int | None, choices: int) -> tuple[int, str]:
    """Connections that a server may have, and a line where open files leave fewer than it would
    take.

    Args:
      wanted: None is one for each choice, and `BESIDE`.
      choices: that may be written or wait, together.

    Raises:
      ValueError: where the limit of open files has no room for those that are wanted, or for any.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    usual = choices + BESIDE if wanted is None else wanted
    if limit == resource.RLIM_INFINITY:
        return usual, ""
    room = limit - len(os.listdir("/dev/fd")) - SPARE
    if room < 1 or (wanted is not None and wanted > room):
        asked = "a connection" if wanted is None else f"connections={wanted}"
        raise ValueError(
            f"{asked} and all else need more than the {limit} files that this process may have "
            f"open, which leave {max(room, 0)} for connections: raise the limit with ulimit -n, or "
            "lower --connections."
        )
    if room >= usual:
        return usual, ""
    return room, (
        f"connections: {room}, as the limit of {limit} open files (ulimit -n) leaves no room for "
        f"{usual}"
    )


def settings() -> dict[str, Any]:
    """What uvicorn is told of connections."""
    return {
        "timeout_keep_alive": KEEP_ALIVE,
        # Accepted at a time, before connections that they are too many for can be closed.
        "backlog": SPARE // 4,
        "h11_max_incomplete_event_size": 2**14,
        "ws": "none",
        # What strangers send is nothing to write a line about.
        "log_level": "error",
    }
