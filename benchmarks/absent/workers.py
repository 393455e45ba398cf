"""Compiler processes: the rows of a report, compiled by several processes at a time.

Every process goes through the same list of rows, and compiles those that no other has claimed.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.absent.rows import Figures
from benchmarks.absent.selection import Claims, Selection

Rows = Callable[..., Iterator[Figures]]
"""Rows of a part, by a `Selection`, `quick` and `keep`."""


class Work(NamedTuple):
    """What the processes compile.

    Attributes:
      parts: names, with the function of `rows_of`.
      rows_of: the rows of a part; must be importable.
      names, quick, keep: of the command line.
    """

    parts: tuple[str, ...]
    rows_of: Callable[[str], Rows]
    names: tuple[str, ...]
    quick: bool
    keep: Path | None


class Compiled(NamedTuple):
    """A row of a part, and its place among the rows of all processes."""

    part: str
    place: int
    row: Figures


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compiled_rows(work: Work, processes: int) -> Iterator[Compiled]:
    """The rows of all parts, as soon as each is compiled.

    Raises:
      RuntimeError: if a compiler ends its process; the row is named.
    """
    if processes == 1:
        yield from _rows(work, Claims(multiprocessing.Value("i", 0)))
        return
    # A fork of a process that runs threads may hang.
    context = multiprocessing.get_context("spawn")
    next_row, open_ends, started = context.Value("i", 0), [], []
    try:
        for _ in range(processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(work, next_row, sender), daemon=True)
            process.start()
            # The process has its own: once that is closed, reading ends.
            sender.close()
            open_ends.append(receiver)
            started.append(process)
        yield from _received(open_ends)
        # They end by themselves; a library of compilers prints its stack at a signal.
        for process in started:
            process.join()
    finally:
        for process in started:
            process.terminate()
            process.join()


def _received(open_ends: list[Connection]) -> Iterator[Compiled]:
    labels = dict.fromkeys(open_ends, "before its first row")
    while open_ends:
        ready: list[Any] = wait(open_ends)
        for end in ready:
            try:
                message = end.recv()
            except EOFError:
                message = RuntimeError(f"the compiler ended its process, {labels[end]}")
            if isinstance(message, str):
                labels[end] = message
            elif isinstance(message, Exception):
                raise message
            elif message is None:
                open_ends.remove(end)
            else:
                yield message


def _send(work: Work, next_row: Any, sender: Connection) -> None:
    """Sends the label of each row before it is compiled, then the row, and None at the end."""
    claims = _Announced(next_row, sender)
    try:
        for compiled in _rows(work, claims):
            sender.send(compiled)
    except KeyboardInterrupt:
        return
    except Exception as error:  # whatever it is: the command has to name the row, and end
        sender.send(RuntimeError(f"{claims.label}: {type(error).__name__}: {error}"))
        raise
    sender.send(None)


class _Announced(Claims):
    def __init__(self, next_row: Any, sender: Connection) -> None:
        super().__init__(next_row)
        self._sender = sender

    def claim(self, label: str) -> bool:
        claimed = super().claim(label)
        if claimed:
            self._sender.send(label)
        return claimed


def _rows(work: Work, claims: Claims) -> Iterator[Compiled]:
    for part in work.parts:
        selection = Selection(work.names, claims)
        for row in work.rows_of(part)(selection, quick=work.quick, keep=work.keep):
            yield Compiled(part, claims.last, row)
