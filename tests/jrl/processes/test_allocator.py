"""Freed memory goes back to the system."""

import os
import platform
import subprocess
import sys

import pytest

from jrl.processes.allocator import VARIABLES

# Freeing a block of 24 MiB raises glibc's threshold; small blocks keep the heap from shrinking.
PROGRAM = """
import os, sys
import numpy as np
from jrl.processes import allocator

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

if sys.argv[1] == "fixed":
    allocator.return_arrays_when_freed()
np.ones(3 << 20)
arrays, pins = [], []
for _ in range(40):
    arrays.append(np.ones(3 << 18))
    pins.append(bytearray(100_000))
full = resident()
del arrays
freed = resident()
allocator.return_free_memory()
print(full - freed, full - resident())
"""
TOTAL = 240
"""MiB of the arrays of 6 MiB."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(
    ("mode", "variable", "is_returned"),
    [
        ("fixed", None, True),
        pytest.param("default", None, False, marks=pytest.mark.slow),
        pytest.param("fixed", VARIABLES[0], False, marks=pytest.mark.slow),
    ],
)
def test_arrays_are_returned_when_they_are_freed(mode, variable, is_returned):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if variable is not None:  # the user's own choice
        environment[variable] = str(32 << 20)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    freed, trimmed = map(int, done.stdout.split())
    assert (freed > 0.9 * TOTAL) == is_returned
    assert trimmed > 0.9 * TOTAL
