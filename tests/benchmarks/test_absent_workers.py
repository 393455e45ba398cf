"""Rows that several processes compile: each once, in the order of one process."""

import multiprocessing
import os
import subprocess
import sys

import pytest
from places import ROOT

from benchmarks.absent.selection import Claims, Selection
from benchmarks.absent.workers import Work, compiled_rows

PARTS = {"odd": 3, "even": 4}


def rows_of(part):
    """Rows of a part, two of each case; a case named "crash" ends the process."""

    def rows(selection, *, quick, keep):
        for number in range(PARTS.get(part, 1)):
            label = f"{part} {number}"
            if not selection.takes(label):
                continue
            if part == "crash":
                os._exit(3)
            if part == "error":
                raise KeyError("a field")
            yield from ({"label": label, "kernel": kernel} for kernel in range(2))

    return rows


def labels(found):
    in_order = sorted(found, key=lambda compiled: compiled.place)
    return [(one.part, one.row["label"], one.row["kernel"]) for one in in_order]


def work(*parts, names=()):
    return Work(parts, rows_of, names, False, None)


def test_the_command_is_imported_without_jax():
    """JAX reads the environment, which the command sets first, when it is imported."""
    code = "import sys, benchmarks.absent.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_names_select_rows():
    assert Selection().takes("h100 a network")
    assert Selection(["v5p", "h100"]).takes("h100 a network")
    assert not Selection(["v5p"]).takes("h100 a network")


def test_a_row_is_claimed_by_the_first_process_that_meets_it():
    next_row = multiprocessing.Value("i", 0)
    first, second = Claims(next_row), Claims(next_row)
    assert [first.claim("a"), first.claim("b")] == [True, True]
    assert [second.claim(label) for label in "abc"] == [False, False, True]
    assert [first.claim(label) for label in "cd"] == [False, True]
    assert (first.last, first.label) == (3, "d")
    assert (second.last, second.label) == (2, "c")


@pytest.mark.slow
def test_processes_compile_the_rows_of_one():
    single = list(compiled_rows(work("odd", "even"), 1))
    assert labels(single) == [
        (part, f"{part} {number}", kernel)
        for part, count in PARTS.items()
        for number in range(count)
        for kernel in range(2)
    ]
    assert labels(compiled_rows(work("odd", "even"), 3)) == labels(single)
    (named,) = {one.row["label"] for one in compiled_rows(work("odd", "even", names=("n 2",)), 2)}
    assert named == "even 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "message"),
    [("crash", "the compiler ended its process, crash 0"), ("error", "error 0: KeyError")],
)
def test_a_row_that_ends_its_process_is_named(part, message):
    with pytest.raises(RuntimeError, match=message):
        list(compiled_rows(work(part), 2))
