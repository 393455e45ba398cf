"""Errors of a file system, each in one line."""

import atexit
import errno
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REMEDIES = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space in the quota",
    errno.EMFILE: "raise the limit of open files (ulimit -n 4096)",
    errno.ENFILE: "close other programs, as the machine has no more files to open",
    errno.EROFS: "make the disk writable",
    errno.EACCES: "make the folder writable for this user",
    errno.EPERM: "make the folder writable for this user",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EIO: "check that disk",
}
"""Remedies of a user for errors of the operating system."""


class StorageError(RuntimeError):
    """A file that the operating system did not let the run write."""


def errno_of(error: BaseException) -> int | None:
    """The number of the operating system's error that an exception, or what caused it, comes from:
    libraries in C++ have it in their text alone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in REMEDIES:
            return seen.errno
        text = str(seen)
        for number in REMEDIES:
            if re.search(rf"{re.escape(os.strerror(number))}|\b{errno.errorcode[number]}\b", text):
                return number
        seen = seen.__cause__ or seen.__context__
    return None


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Context in which `path` is written; a refused write raises an error of one line.

    Args:
      remedy: what is left, and how to continue.

    Raises:
      StorageError: where the operating system refused something.
    """
    # Threads of Orbax write each failure with its stack beside the exception.
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        if number is None:
            raise
        # What Orbax left half done complains once more when the interpreter ends.
        atexit.register(_silence_stderr)
        raise StorageError(f"{path}: {os.strerror(number)}: {REMEDIES[number]}. {remedy}") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        sys.unraisablehook = hook


def _silence_stderr() -> None:
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
