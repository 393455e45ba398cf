"""Rows of `benchmarks.gpu` in processes that hang, die and break their device."""

import sys
import time

import pytest

from benchmarks.gpu import processes
from benchmarks.gpu.parts import Listed
from benchmarks.gpu.processes import BROKEN, MARK, figures_of
from benchmarks.gpu.rows import Settings

# Stands for the interpreter: what it does is asked for by the part, from the row to begin with on.
CHILD = """import json, sys, time
asked = json.loads(sys.argv[-1])

def say(line):
    print("{mark}" + json.dumps(line), flush=True)

say({{"about": {{"seed": asked["settings"]["seed"]}}}})
print("a line of somebody else", flush=True)
for number, what in enumerate(asked["part"].split()):
    if number < asked["skip"]:
        continue
    if what == "silent":
        sys.exit(7)
    named = {{"row": what, "form": str(number)}}
    say({{"begin": named}})
    if what == "hangs":
        time.sleep(60)
    if what == "dies":
        sys.exit(5)
    if what == "breaks":
        say({{**named, "failed": "bad access"}})
        sys.exit({broken})
    say({{**named, "milliseconds": 1.0}})
say({{"end": asked["part"]}})
"""


def no_rows(settings):
    """Rows that the process would be asked for."""
    return iter(())


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The figures of a part, its rows by what happens in them."""
    script, child = tmp_path / "script.py", tmp_path / "python"
    script.write_text(CHILD.format(mark=MARK, broken=BROKEN))
    # Through a shell: the path of an interpreter after #! may have no spaces.
    child.write_text(f"#!/bin/sh\nexec '{sys.executable}' -S '{script}' \"$@\"\n")
    child.chmod(0o755)

    def run(part, seconds=0.7, until=60.0):
        monkeypatch.setitem(processes.PARTS, part, Listed(no_rows, seconds=seconds))
        settings = Settings(small=False, seed=3)
        lines = list(figures_of(part, settings, str(child), time.monotonic() + until))
        about = [line["about"] for line in lines if "about" in line]
        assert all(one == {"seed": 3} for one in about)
        rows = [line for line in lines if "about" not in line]
        assert all(row.pop("part") == part for row in rows)
        return len(about), rows

    return run


def of(name, number, **figures):
    return {"row": name, "form": str(number), **figures}


@pytest.mark.slow
def test_a_row_that_dies_or_hangs_has_failed_and_the_next_ones_are_measured(measured, capfd):
    started, rows = measured("works dies works hangs works")
    assert started == 3
    assert rows == [
        of("works", 0, milliseconds=1.0),
        of("dies", 1, failed="its process ended with status 5"),
        of("works", 2, milliseconds=1.0),
        of("hangs", 3, failed="took more than 0.7 s"),
        of("works", 4, milliseconds=1.0),
    ]
    assert "a line of somebody else" in capfd.readouterr().err


def test_a_row_that_breaks_the_device_is_one_row(measured):
    started, rows = measured("breaks works")
    assert started == 2
    assert rows == [of("breaks", 0, failed="bad access"), of("works", 1, milliseconds=1.0)]


def test_silent_process_ends_the_part(measured):
    started, rows = measured("works silent works")
    assert started == 1
    all_others = {"row": "works silent works/all others", "form": "any"}
    why = "its process ended with status 7"
    assert rows == [of("works", 0, milliseconds=1.0), {**all_others, "failed": why}]


@pytest.mark.slow
def test_rows_after_the_time_limit_are_left_out(measured):
    assert measured("works hangs works", seconds=60.0, until=1.0)[1] == [
        of("works", 0, milliseconds=1.0),
        of("hangs", 1, left_out="time was over"),
    ]
    name = "works works/all others"
    assert measured("works works", until=0.0) == (
        0,
        [{"row": name, "form": "any", "left_out": "time was over"}],
    )
