"""Storage of checkpoints: a background thread that completes a save while training continues, and
one-line errors with a remedy for failures of the operating system."""

import atexit
import contextlib
import errno
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jrl.processes.agreement import is_multiprocess
from jrl.processes.coordinator import BackgroundGather, ProcessFailed
from jrl.processes.progress import AGREEMENT, CHECKPOINT, phase
from jrl.runs.directory import StoragePath, bucket_error, is_bucket
from jrl.runs.records import REMEDIES

LOGGERS = [logging.getLogger(name) for name in ("absl", "asyncio")]
"""Loggers to which Orbax's threads write the stack of each failure, besides the exception."""


class StorageError(RuntimeError):
    """Error of a file that the operating system or Google Cloud Storage did not allow to write."""


def errno_of(error: BaseException) -> int | None:
    """Error number of the operating system behind an exception or its causes; C++ libraries have it
    in their text only."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in REMEDIES:
            return seen.errno
        text = str(seen)
        for code in REMEDIES:
            if re.search(rf"{re.escape(os.strerror(code))}|\b{errno.errorcode[code]}\b", text):
                return code
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def writing(path: StoragePath, remedy: str) -> Iterator[None]:
    """Context in which `path` is written. Errors of the operating system, and all errors of an
    address in Google Cloud Storage, become a StorageError of one line that ends with `remedy`: the
    remaining state, and the way to continue."""
    try:
        with quiet:
            yield
    except ProcessFailed:  # its files are not `path`'s here
        quiet.ignore_late_writes()
        raise
    except Exception as error:
        if is_bucket(path):
            reason = bucket_error(error)
        elif (code := errno_of(error)) is not None:
            reason = f"{os.strerror(code)}: {REMEDIES[code]}"
            # Unfinished writes of Orbax report errors again when the interpreter ends.
            atexit.register(_silence_stderr)
        else:
            raise
        quiet.ignore_late_writes()
        raise StorageError(f"{path}: {reason}. {remedy}") from None


def _is_no_thread_failure(record: logging.LogRecord) -> bool:
    """False for the log of a failed Orbax thread, whose exception `save` raises."""
    return "_SignalingThread.run() raised an exception" not in record.getMessage()


class _WithoutLateWrites:
    """Hook for unraisable exceptions that drops exceptions of writes that end after their save has
    failed, as its event loop is closed. `hook` receives all others."""

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)


class _Quiet:
    """Context in which Orbax's threads log no failure; it may start in one thread and end in
    another, and several may overlap."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._levels = list[int]()
        self._hook: Callable[[Any], Any] = sys.unraisablehook

    def ignore_late_writes(self) -> None:
        """Silences writes of a failed save permanently: other threads of Orbax may still write, and
        fail, after the first."""
        for logger in LOGGERS:
            logger.addFilter(_is_no_thread_failure)  # once: a filter is not added twice
        with self._lock:
            hook = self._hook if self._count else sys.unraisablehook
            if not isinstance(hook, _WithoutLateWrites):
                hook = _WithoutLateWrites(hook)
            self._hook = hook
            if not self._count:
                sys.unraisablehook = hook

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if self._count > 1:
                return
            self._levels, self._hook = [each.level for each in LOGGERS], sys.unraisablehook
            for logger in LOGGERS:
                logger.setLevel(logging.CRITICAL)
            sys.unraisablehook = lambda _: None

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count:
                return
            for logger, level in zip(LOGGERS, self._levels, strict=True):
                logger.setLevel(level)
            sys.unraisablehook = self._hook


quiet = _Quiet()


def _silence_stderr() -> None:
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


class BackgroundSave:
    """Thread that completes the checkpoint of one step; every process has one.

    Args:
      complete: writes the copied state; returns when the checkpoint is complete in all processes.
      gather: all-gather of the threads of all processes, for `complete`.
    """

    def __init__(self, complete: Callable[[], None], gather: BackgroundGather):
        self._gather = gather
        self._error: Exception | None = None
        # As an argument: the thread then releases them at its end, and with them the copy of the
        # state.
        self._thread = threading.Thread(target=self._run, args=(complete,), name="jrl checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the checkpoint is complete, and raises its error.

        A process that waits for the others is in the phase of an agreement, so that the watchdog
        reports the process whose files are late.
        """
        with phase(CHECKPOINT):
            self._gather.waits.wait()
            if not is_multiprocess():
                self._thread.join()
        if is_multiprocess():
            with phase(AGREEMENT):
                self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Ends the wait for the other processes, which may have ended."""
        self._gather.abandon()

    def _run(self, complete: Callable[[], None]) -> None:
        try:
            complete()
        except Exception as error:  # raised again by `wait`
            self._error = error
            with contextlib.suppress(RuntimeError):  # the service may have ended
                self._gather.fail(str(error))
        finally:
            self._gather.waits.set()
