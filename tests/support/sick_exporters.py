"""Exporters on 127.0.0.1 that answer as they should not: each is a function of its connection."""

import gzip
import socket
import socketserver
import struct
import threading
import time

METRIC = 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 95\n'
PAUSE = 0.05
"""Seconds between two bytes of what never ends."""


def response(body, *headers, status="200 OK"):
    """Bytes of a response with the right length."""
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def says(body, *headers, **status):
    """An exporter that sends a response."""
    return lambda connection, stopped: connection.sendall(response(body, *headers, **status))


def sends(*parts):
    """An exporter that sends bytes and closes."""
    return lambda connection, stopped: connection.sendall(b"".join(parts))


def drips(*parts, drop):
    """An exporter that sends bytes, and then the same few again and again, slowly."""

    def answer(connection, stopped):
        connection.sendall(b"".join(parts))
        while not stopped.wait(PAUSE):
            connection.sendall(drop)

    return answer


def floods(*parts, wave):
    """An exporter that never ends."""

    def answer(connection, stopped):
        connection.sendall(b"".join(parts))
        while not stopped.is_set():
            connection.sendall(wave)

    return answer


def keeps_silent(connection, stopped):
    stopped.wait()


def resets(connection, stopped):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


OK = b"HTTP/1.1 200 OK\r\n"
TEXT = OK + b"Connection: close\r\n\r\n"
BOMB = gzip.compress(b"\0" * 2**26, 1)
SICK = {
    "cut": (sends(OK, b"Content-Length: 900\r\n\r\n", METRIC.encode()), "cut its answer: 33 bytes"),
    "cut_chunk": (
        sends(OK, b"Transfer-Encoding: chunked\r\n\r\n21\r\n", METRIC.encode(), b"\r\n50\r\nDCGM"),
        "cut its answer",
    ),
    "cut_without_length": (sends(TEXT, METRIC.encode(), b"DCGM_FI_DEV_POWER_USAGE 6"), "is cut"),
    "length_too_small": (sends(OK, b"Content-Length: 30\r\n\r\n", METRIC.encode()), "is cut"),
    "no_chunks": (
        sends(OK, b"Transfer-Encoding: chunked\r\n\r\n", METRIC.encode()),
        "cut its answer",
    ),
    "slow_body": (drips(TEXT, drop=b"x"), "no whole answer in"),
    "slow_headers": (drips(OK, b"X", drop=b"y"), "no whole answer in"),
    "slow_lines": (drips(TEXT, drop=METRIC.encode()), "no whole answer in"),
    "silent": (keeps_silent, "no whole answer in"),
    "endless": (floods(TEXT, wave=METRIC.encode() * 2000), "more than 16 MiB"),
    "endless_line": (floods(TEXT, wave=b"x" * 2**16), "more than 16 MiB"),
    "endless_headers": (floods(OK, wave=b"X-A: b\r\n"), "what is not HTTP: HTTPException"),
    "endless_header": (floods(OK, wave=b"X" * 2**12), "what is not HTTP: LineTooLong"),
    "endless_refusal": (
        floods(b"HTTP/1.1 500 Broken\r\n\r\n", wave=b"broken " * 99),
        "answered 500: broken",
    ),
    "endless_redirect": (
        floods(b"HTTP/1.1 302 Found\r\nLocation: /other\r\n\r\n", wave=b"x" * 2**16),
        "redirects more than 3 times",
    ),
    "not_http": (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), "what is not HTTP: BadStatusLine"),
    "reset": (resets, "cannot be reached"),
    "closed": (sends(), "cannot be reached"),
    "refused": (says("no metrics today\n", status="503 Busy"), "answered 503: no metrics today"),
    "not_text": (says(b'DCGM_FI_DEV_GPU_UTIL{gpu="\xff"} 95\n'), "lines that are no metrics"),
    "binary": (says(bytes(range(256)) + b"\n"), "lines that are no metrics"),
    "html": (says("<html>Login</html>\n"), "lines that are no metrics"),
    "empty": (says(""), "is cut or is no page of metrics"),
    "comments": (says("# HELP x y\n"), "has no metrics"),
    "many_lines": (says("a 1\n" * 300_000), "more than 200000 lines"),
    "no_gzip": (says(METRIC, "Content-Encoding: gzip"), "is gzip, which it is not"),
    "cut_gzip": (says(gzip.compress(METRIC.encode())[:-9], "Content-Encoding: gzip"), "cut its"),
    "gzip_bomb": (says(BOMB, "Content-Encoding: gzip"), "more than 16 MiB"),
    "other_encoding": (says(METRIC, "Content-Encoding: br"), "answers in the encoding 'br'"),
    "old": (says(f"jrl_step_time 1 {int(1e3 * (time.time() - 4000))}\n"), "s old or 60 s ahead"),
    "early": (says(f"jrl_step_time 1 {int(1e3 * (time.time() + 4e6))}\n"), "s old or 60 s ahead"),
    "no_time": (says("jrl_step_time 1 999999999999999999\n"), "s old or 60 s ahead"),
    "elsewhere": (
        says("", "Location: http://192.0.2.1/metrics", status="302 Found"),
        "redirects to http://192.0.2.1/metrics: give the address",
    ),
    "file": (says("", "Location: file:///etc/passwd", status="302 Found"), "redirects to file:"),
    "circle": (says("", "Location: /metrics", status="307 Moved"), "redirects more than 3 times"),
}
"""By name: an exporter, and what is said of it."""


class Exporters:
    """Servers of exporters, until it is closed."""

    def __init__(self):
        self._stopped = threading.Event()
        self._servers = []

    def serve(self, answer):
        """The address of the page of an exporter, a function of connection and end."""
        stopped = self._stopped

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                while self.rfile.readline().strip():
                    pass
                answer(self.request, stopped)

        server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self._servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/metrics"

    def close(self):
        self._stopped.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass  # the reader has closed
