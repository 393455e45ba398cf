"""HTTP answers of machines that may be sick, each fetched apart, with limits of time and size.

An address has a thread of its own. A connection that is still open at the deadline is closed, so
that an exporter that sends one byte every five seconds delays no other; what has no connection yet
(a name that the resolver looks up for minutes) is left alone and not asked again meanwhile.
"""

import http.client
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

MAX_CONCURRENT = 512
"""Addresses that are asked concurrently."""
MAX_REDIRECTS = 3
MAX_SHOWN = 200
"""Characters of another program's text in a message."""
GZIP = 31
"""`wbits` of zlib for the format of gzip."""


@dataclass(frozen=True)
class Limits:
    """Limits of an answer as a whole: name, connection, headers, body and redirects.

    Attributes:
      seconds: after which an address has not answered.
      max_bytes: greatest size of a body, after decompression too.
    """

    seconds: float | int = 10.0
    max_bytes: int = 2**24


class Fetcher:
    """Fetches answers, one address at a time or many concurrently.

    Args:
      limits: of each answer.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._unended: dict[str, _Fetch] = {}

    def fetch(self, addresses: Sequence[str]) -> "list[bytes | str]":
        """Body of each answer, or a line that says why there is none, in order.

        It takes `Limits.seconds` at most, for each `MAX_CONCURRENT` addresses.
        """
        answers: list[bytes | str] = []
        for first in range(0, len(addresses), MAX_CONCURRENT):
            fetches = [self._start(each) for each in addresses[first : first + MAX_CONCURRENT]]
            answers += [each.finish() for each in fetches]
            self._unended |= {each.address: each for each in fetches if each.is_alive()}
        return answers

    def _start(self, address: str) -> "_Fetch":
        """A fetch of an address; the last one if it has not ended."""
        last = self._unended.pop(address, None)
        if last is not None and last.is_alive():
            return last
        fetch = _Fetch(address, self._limits)
        fetch.start()
        return fetch


class _Fetch(threading.Thread):
    """GET request in a thread, which ends when `finish` closes its connection."""

    def __init__(self, address: str, limits: Limits):
        super().__init__(name=f"fetch {address}", daemon=True)
        self.address = address
        self._location = "{0.scheme}://{0.netloc}{0.path}".format(urllib.parse.urlsplit(address))
        self._limits = limits
        self._end = time.monotonic() + limits.seconds
        self._opening = _Opening()
        self._answer: bytes | str = ""

    def run(self) -> None:
        try:
            self._answer = self._read()
        except Exception as error:  # whatever an address sends ends the thread of that address only
            self._answer = f"{self._location} {_explain(error)}"

    def finish(self) -> bytes | str:
        """Waits for the answer until the deadline."""
        self.join(max(0.0, self._end - time.monotonic()))
        if not self.is_alive():
            return self._answer
        self._opening.abort()
        return f"{self._location} gave no whole answer in {self._limits.seconds:g} s"

    def _read(self) -> bytes:
        opener = urllib.request.build_opener(self._opening, _NoRedirects)
        address = self.address
        for _ in range(MAX_REDIRECTS + 1):
            try:
                with opener.open(address, timeout=self._limits.seconds) as response:
                    return self._decode(response.headers, self._read_body(response))
            except urllib.error.HTTPError as error:
                with error:
                    address = _redirected(address, error)
        raise ValueError(f"redirects more than {MAX_REDIRECTS} times, last to {address}")

    def _read_body(self, response: http.client.HTTPResponse) -> bytes:
        body = bytearray()
        while part := response.read(2**16):
            body += part
            if len(body) > self._limits.max_bytes:
                raise ValueError(self._too_large())
        if response.length:
            raise http.client.IncompleteRead(bytes(body), response.length)
        return bytes(body)

    def _decode(self, headers: http.client.HTTPMessage, body: bytes) -> bytes:
        """The body without its Content-Encoding."""
        encoding = headers.get("Content-Encoding", "identity").strip().lower()
        if encoding == "identity":
            return body
        if encoding not in ("gzip", "x-gzip"):
            raise ValueError(f"answers in the encoding {encoding[:MAX_SHOWN]!r}, not in gzip")
        stream = zlib.decompressobj(GZIP)
        try:
            content = stream.decompress(body, self._limits.max_bytes + 1)
        except zlib.error as error:
            raise ValueError(f"says that its answer is gzip, which it is not: {error}") from None
        if len(content) > self._limits.max_bytes:
            raise ValueError(self._too_large())
        if not stream.eof:
            raise ValueError("cut its answer: the end of the gzip is missing")
        return content

    def _too_large(self) -> str:
        return f"answers with more than {self._limits.max_bytes / 2**20:g} MiB"


class _Opening(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Handler of http and https that keeps the sockets of its connections."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: list[socket.socket] = []
        self._aborted = False

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._recorded(http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._recorded(http.client.HTTPSConnection), req)

    def abort(self) -> None:
        """Closes all connections, of which a read then ends."""
        self._aborted = True
        for each in self._sockets:
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def _recorded(self, kind: type[http.client.HTTPConnection]) -> Callable:
        def make(*arguments, **settings) -> http.client.HTTPConnection:
            connection = kind(*arguments, **settings)
            connect = connection.connect

            def record() -> None:
                connect()
                self._sockets.append(connection.sock)
                if self._aborted:
                    raise TimeoutError("the deadline has passed")

            connection.connect = record
            return connection

        return make


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Leaves redirects to the caller: the standard handler reads bodies of any size."""

    def redirect_request(self, req, fp, code, msg, headers, newurl) -> None:
        return None


def _redirected(address: str, error: urllib.error.HTTPError) -> str:
    """Address on the same host that an answer redirects to; another host would be counted as this.

    Raises:
      ValueError: if the answer is another error, with the beginning of its body.
    """
    target = error.headers.get("Location")
    if error.code not in (301, 302, 303, 307, 308) or target is None:
        reason = error.read(MAX_SHOWN).decode(errors="replace")
        raise ValueError(f"answered {error.code}: {' '.join(reason.split()) or error.reason}")
    target = urllib.parse.urljoin(address, target)
    old, new = map(urllib.parse.urlsplit, (address, target))
    if new.scheme not in ("http", "https") or new.hostname != old.hostname:
        raise ValueError(f"redirects to {target[:MAX_SHOWN]}: give the address of the page itself")
    return target


def _explain(error: Exception) -> str:
    """Fault of an address, as the end of a sentence that begins with the address."""
    match error:
        case http.client.IncompleteRead():
            missing = "" if error.expected is None else f", {error.expected} are missing"
            return f"cut its answer: {len(error.partial)} bytes arrived{missing}"
        case urllib.error.URLError():
            return f"cannot be reached: {error.reason}"
        case OSError() | UnicodeError():
            return f"cannot be reached: {error}"
        case http.client.HTTPException():
            return f"answers what is not HTTP: {type(error).__name__} {str(error)[:MAX_SHOWN]!r}"
    return str(error)
