"""The report of compiled programs: rows of earlier runs stay, and tables have a cell for each."""

import json

import pytest

from benchmarks.absent.report import (
    EXCHANGES,
    KERNELS,
    LAUNCHES,
    SCHEDULE,
    STEPS,
    line_of,
    markdown,
    memory_of,
    read,
    seconds_text,
    write,
)
from benchmarks.absent.rows import NAMES, merged

VERSIONS = {"date": "2026-01-01", "versions": {"jax": "1.2"}}
UPDATE = {
    **{"device": "h100", "layout": "dp8 / ep8", "program": "a network", "seconds": 3.0},
    **{"arguments": 30 * 2**30, "temporaries": 10 * 2**30, "predicted": 50.0 * 2**30},
    **{"collectives": 24, "asynchronous": 23, "kernels": ["route"], "defects": []},
}
OVERLAPPED = {
    **{"device": "v5p", "layout": "dp8 / ep8", "program": "a network", "flags": "--overlap-it"},
    **{"seconds": 3.0, "temporaries": 2**30, "collectives": 9, "asynchronous": 7},
    **{"communication": 8e-3, "exposed": 2e-3},
    **{"communication_of_layers": 4e-3, "exposed_of_layers": 0.0},
}
COUNTED = {
    **{"device": "h100", "program": "decoding step", "form": "None", "seconds": 3.0},
    **{"launches": 2790, "per_turn": 3, "temporaries": 2**29},
}
SENT = {
    **{"device": "h100", "layout": "dp64 / ep64", "program": "experts layer", "form": "two_level"},
    **{"compiled": {"inside": 2048, "across": 1 << 20}, "seconds": 3.0},
    **{"planned": {"inside": 2048, "across": 3 << 20}},
}


def test_each_row_is_a_line_and_a_row_of_its_table():
    figures = VERSIONS | {STEPS: [UPDATE], SCHEDULE: [OVERLAPPED], LAUNCHES: [COUNTED]}
    figures |= {EXCHANGES: [SENT]}
    text = markdown(figures)
    assert "4 compiled, 0 refused" in text
    assert "steps 3 s, schedule 3 s, launches 3 s, exchanges 3 s; 12 s in all" in text
    assert "| a network | 30.0 | 10.0 |  | 51% | 50.0 | 1.25 | 24 | 23 |  |" in text
    assert "| `--overlap-it` | 9 | 7 | 8.0 | 75% | 4.0 | 100% | 1.0 |" in text
    assert "| decoding step | None | 2,790 | 3 | 0.5 |" in text
    assert "7 of 9 collectives asynchronous, 75% of 8.00 ms hidden" in line_of(OVERLAPPED)
    assert "2,790 launches, 3 for each further turn" in line_of(COUNTED)
    assert "| dp64 / ep64 | two_level | 2 | 2 | 1,024 | 3,072 |" in text
    assert "2 KiB (planned 2) inside a server, 1,024 KiB (planned 3,072)" in line_of(SENT)
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_markdown_schedule_includes_steps_without_flags():
    """Rows of a program are neighbours, the one that has no flag first."""
    names = "collectives", "asynchronous", "communication", "exposed"
    names += "communication_of_layers", "exposed_of_layers"
    overlap = {name: OVERLAPPED[name] for name in names} | {"exposed": 6e-3}
    other = UPDATE | {"program": "another"}
    flagged = OVERLAPPED | {"device": "h100"}
    steps = [UPDATE | {"overlap": overlap}, other | {"overlap": overlap}, UPDATE]
    text = markdown(VERSIONS | {STEPS: steps, SCHEDULE: [flagged]})
    table = text.split("\n\n")[-1].splitlines()[2:]
    begin = "| h100 | dp8 / ep8 | "
    assert [line.removeprefix(begin).split(" | ")[:2] for line in table] == [
        ["a network", "without a flag"],
        ["a network", "`--overlap-it`"],
        ["another", "without a flag"],
    ]
    assert "| without a flag | 9 | 7 | 8.0 | 25% |" in table[0]


def test_memory_of_row_counts_other_buffers():
    half = UPDATE | {"others": 10 * 2**30}
    assert memory_of(half) == 50 * 2**30
    text = markdown(VERSIONS | {STEPS: [half]})
    assert "| a network | 30.0 | 10.0 | 10.0 | 63% | 50.0 | 1.00 | 24 | 23 |  |" in text


@pytest.mark.parametrize(
    ("part", "row"),
    [(STEPS, UPDATE), (SCHEDULE, OVERLAPPED), (LAUNCHES, COUNTED), (EXCHANGES, SENT)],
)
def test_a_refused_row_has_as_many_cells(part, row):
    refused = {name: row[name] for name in NAMES if name in row} | {"error": "no memory"}
    text = markdown(VERSIONS | {part: [refused]})
    assert "1 refused" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert line_of(refused).endswith("no memory")


def test_merged_keeps_rows_that_were_not_compiled_again():
    before = [UPDATE, UPDATE | {"program": "another"}]
    assert merged(before, [UPDATE | {"seconds": 4.0}]) == [UPDATE | {"seconds": 4.0}, before[1]]


def test_read_refuses_rows_of_other_versions(tmp_path):
    write(tmp_path, VERSIONS | {STEPS: [UPDATE]})
    assert json.loads((tmp_path / "absent.json").read_text())[STEPS] == [UPDATE]
    assert read(tmp_path, VERSIONS | {"date": "2026-02-02"})[STEPS] == [UPDATE]
    with pytest.raises(ValueError, match=r"absent\.json was made by other versions \(jax 1\.2\): "):
        read(tmp_path, VERSIONS | {"versions": {"jax": "1.3"}})


def test_seconds_text_counts_an_operation_once():
    rows = [{"operation": name, "seconds": 2.0} for name in ("a", "b", "b")]
    assert seconds_text({KERNELS: rows}) == "Processor time: kernels 4 s; 4 s in all"


def test_merged_replaces_rows_in_place():
    def rows(*names):
        return [{"operation": name, "kernel": kernel} for name, kernel in names]

    before = rows(("a", "x"), ("b", "y"), ("b", "z"), ("c", "v"))
    actual = rows(("d", "w"), ("b", "u"), ("b", "t"))
    expected = rows(("a", "x"), ("b", "u"), ("b", "t"), ("c", "v"), ("d", "w"))
    assert merged(before, actual) == expected
    assert merged([], actual) == actual
