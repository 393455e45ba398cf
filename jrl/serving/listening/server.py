"""HTTP server of the application on a port, until the process is asked to end."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import uvicorn

from jrl.processes.stopping import Stop
from jrl.serving.application import FrontEnd
from jrl.serving.errors import one_line
from jrl.serving.listening.connections import Connections, uvicorn_settings
from jrl.serving.service import Service

POLL_SECONDS = 0.1
"""Seconds between two checks for a request to end the server."""
DELIVERY_SECONDS = 5
"""Seconds after the end of the engine in which clients may take the rest of their responses, and as
many again for what the operating system still buffers of these."""
BACKLOG = 1024
"""Connections that the operating system queues until they are accepted."""
FOLLOW_SECONDS = 2.0
"""Seconds between two polls for a later policy."""


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
      ValueError: where the port is not available.
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
    """Checks that an address is reachable from this machine only.

    Raises:
      ValueError: where `listening` is not bound to a loopback address.
    """
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
      service: started.
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
        timeout_graceful_shutdown=DELIVERY_SECONDS,
        **uvicorn_settings(),
    )
    server = _Server(config)
    watching = asyncio.create_task(connections.watch())
    following = asyncio.create_task(_follow(service)) if follow else None
    ending = asyncio.create_task(_stop_when_done(server, service, front, stop))
    try:
        await server.serve(sockets=[listening])
    finally:
        ending.cancel()
        watching.cancel()
        if following is not None:
            following.cancel()


async def _stop_when_done(
    server: uvicorn.Server, service: Service, front: FrontEnd, stop: Stop
) -> None:
    while not stop and service.failure is None:
        await asyncio.sleep(POLL_SECONDS)
    service.close()
    while not service.ended:
        await asyncio.sleep(POLL_SECONDS)
    front.end(DELIVERY_SECONDS)
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
        except Exception as error:  # of whatever library reads them: what is served goes on
            rejected = newest
            subject = "a later step" if newest is None else f"step {newest}"
            line = f"warning: {subject} is not served: {one_line(error)}"
        if line != printed:
            printed = line
            print(line, file=sys.stderr, flush=True)
