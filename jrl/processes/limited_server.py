"""HTTP server of a process that has other work: few connections, each for a few seconds.

A training process serves its metrics beside its work. Connections that send nothing, or a byte now
and then, must not take its descriptors and threads, nor keep a scraper out.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_CONNECTIONS = 16
"""Connections at a time; a further one closes the oldest."""
SECONDS = 10.0
"""Time from a connection to the end of its answer, after which it is closed."""
Answer = tuple[HTTPStatus, bytes, str]
"""Status, body and content type."""


class LimitedServer(ThreadingHTTPServer):
    """Serves answers to GET requests in threads, until it is closed.

    Args:
      address: to listen on: a host or IP address, and a port; 0 takes a free one.
      answer: answer to a path without its query.
      max_connections, seconds: see `MAX_CONNECTIONS` and `SECONDS`.

    Raises:
      OSError, OverflowError: if the port is not available.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        answer: Callable[[str], Answer],
        *,
        max_connections: int = MAX_CONNECTIONS,
        seconds: float | int = SECONDS,
    ):
        self._max, self._seconds = max_connections, seconds
        self._lock = threading.Lock()
        self._begun: dict[socket.socket, float] = {}  # the oldest first
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _handler(answer, seconds))
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._begun)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._end(len(self._begun))
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._end(len(self._begun) + 1 - self._max)
        with self._lock:
            self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._begun.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that are too old; `serve_forever` calls this twice a second."""
        oldest = time.monotonic() - self._seconds
        with self._lock:
            late = sum(begun < oldest for begun in self._begun.values())
        self._end(late)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke or was ended is no error of the server."""

    def _end(self, number: int) -> None:
        """Ends the oldest connections; the thread of each closes it."""
        with self._lock:
            ended = list(self._begun)[: max(0, number)]
            for request in ended:
                del self._begun[request]
        for request in ended:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)


def _handler(answer: Callable[[str], Answer], seconds: float | int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = seconds

        def do_GET(self) -> None:
            status, body, kind = answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass  # no line for each scrape

    return Handler
