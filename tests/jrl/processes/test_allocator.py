"""Freed memory goes back to the system."""

import platform
import subprocess
import sys

import pytest

# Freeing a block of 24 MiB raises glibc's threshold; small blocks keep the heap from shrinking.
PROGRAM = """
import os, sys
import numpy as np
from jrl.processes.allocator import return_free_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

np.ones(3 << 20)
arrays, pins = [], []
for _ in range(int(sys.argv[1])):
    arrays.append(np.ones(3 << 18))
    pins.append(bytearray(100_000))
full = resident()
del arrays
freed = resident()
return_free_memory()
print(full - freed, full - resident())
"""
SIZE = 6
"""MiB of an array."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(
    ("number", "is_returned"), [(60, True), pytest.param(20, False, marks=pytest.mark.slow)]
)
def test_free_memory_is_returned_if_it_is_much(number, is_returned):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(number)], capture_output=True, text=True, check=True
    )
    freed, returned = map(int, done.stdout.split())
    assert freed < 0.2 * number * SIZE
    assert (returned > 0.8 * number * SIZE) == is_returned
