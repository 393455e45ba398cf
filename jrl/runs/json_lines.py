"""JSON lines of a run's output, for log collectors (``--log-json``)."""

import io
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

LEVELS = {"error:": "error", "warning:": "warning", "ALARM:": "warning"}
"""Levels of lines by their first word; the default is info."""


class JsonLines(io.TextIOBase):
    """Text stream that writes each line as a JSON object to another stream.

    ``{"time": ..., "level": ..., "host": ..., "process": ..., "message": ...}``, with the time in
    UTC (ISO 8601). Blank lines are left out. The index of the process is read for each line.
    """

    encoding = "utf-8"
    errors = "strict"

    def __init__(
        self,
        stream: Any,
        process: Callable[[], int],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        self.stream = stream
        self._process, self._now = process, now
        self._host = socket.gethostname()
        self._rest = ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str, /) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in filter(str.strip, lines):
                self._write_line(line)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def finish(self) -> None:
        """Writes a last line that has no newline."""
        self.write("\n")
        self.flush()

    def _write_line(self, line: str) -> None:
        record = {
            "time": self._now().isoformat(timespec="milliseconds"),
            "level": LEVELS.get(line.split(maxsplit=1)[0], "info"),
            "host": self._host,
            "process": self._process(),
            "message": line.rstrip(),
        }
        # ASCII, so that the stream's encoding can write it.
        self.stream.write(json.dumps(record) + "\n")
        self.stream.flush()


def start_json_lines(name: str, process: Callable[[], int]) -> None:
    """Makes `sys.stdout` or `sys.stderr`, as `name` says, write JSON lines."""
    stream = getattr(sys, name)
    if not isinstance(stream, JsonLines):
        setattr(sys, name, JsonLines(stream, process))


@contextmanager
def restoring_streams() -> Iterator[None]:
    """Context manager that restores standard output and error at its end."""
    try:
        yield
    finally:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, JsonLines):
                stream.finish()
                setattr(sys, name, stream.stream)
