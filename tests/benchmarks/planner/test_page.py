"""The page of the planner shows what its commands print."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.planner.calibration import MAPPINGS, comparison_table, fit, predict
from moe.planner.__main__ import main
from moe.planner.communication import exposed_seconds
from moe.planner.search import Plan, layouts
from sharding.costs.hardware import HARDWARE

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "results" / "planner.txt").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?m)^python -m sharding\.planner (.*)$", PAGE)


def test_comparison_table_is_in_the_results():
    table = comparison_table()
    assert table in RESULTS
    for line in table.splitlines()[:2]:
        assert re.findall(r"[\d.]+(?=% of peak)", line)[0] + "%" in PAGE


@pytest.mark.slow
def test_the_page_shows_the_answer(capsys):
    words = shlex.split(COMMANDS[0])
    assert main(words[: words.index("--picture")]) == 0
    assert capsys.readouterr().out.rstrip() in PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "says {step}, and with"),
        ("--two-batch-overlap", "with `{flags}` {step};"),
        (
            "--two-batch-overlap --expert-chunks 1 2 4 --overlap-grad-reduce",
            "with `--expert-chunks 1 2 4` and `--overlap-grad-reduce` too {step}.",
        ),
    ],
)
def test_the_page_says_what_overlap_brings(flags, words):
    """In a process without checks of annotations, which take thirty times as long as the search."""
    command = [sys.executable, "-m", "moe.planner", *shlex.split(f"{COMMANDS[1]} {flags}")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    step = re.search(r"[\d.]+ s(?=  )", found.stdout.splitlines()[3])
    assert step is not None
    assert words.format(step=step[0], flags=flags) in PAGE


def test_the_speed_of_four_pieces_is_what_the_page_says():
    times = [1 - part + exposed_seconds(part, 1 - part, 4) for part in (0.30, 0.35)]
    assert "30 to 35% of a step is communication, four pieces make it " in PAGE
    assert f"make it {1 / times[0]:.2f} to {1 / times[1]:.2f} times as fast" in PAGE


@pytest.mark.parametrize(
    ("model", "gain"),
    [("mixtral-8x22b", 1.05), ("mixtral-8x22b-g8t8", 1.63), ("llama3-8x70b", 1.22)],
)
def test_the_gains_in_the_text_are_those_of_the_table(model, gain):
    without, folded = (found for _, found in rates(model)[-2:])
    assert folded / without == pytest.approx(gain, abs=0.006)
    assert f"{gain:.2f}" in PAGE


def rates(model):
    """(published, predicted) of a model's mappings in the results, in percent; one that ran out of
    memory is left out."""
    table = RESULTS[RESULTS.index("Mappings (MoE Parallel Folding") :]
    rows = [line for line in table.splitlines() if line.startswith(f"{model} ")][:4]
    found = [re.search(r" ([\d.]+) +([\d.]+)(?: \(calibrated\))?$", row) for row in rows]
    return [
        (float(match[1]), float(match[2]))
        for row, match in zip(rows, found, strict=True)
        if match is not None and "out of memory" not in row
    ]


def test_what_is_not_explained_is_what_the_table_says():
    text = " ".join(PAGE.split())
    fine, qwen2 = (rates(model)[-1] for model in ("mixtral-8x22b-g8t8", "qwen2-57b-a14b"))
    words = "predicts G8T8 at {1} for a measured {0} and Qwen2 at {3} for {2}."
    assert words.format(*fine, *qwen2) in text
    plan = predict(MAPPINGS["llama3-8x70b"][1], fit("Megatron-Core"))
    assert isinstance(plan, Plan)
    assert plan.method.execution.remat == "full"
    assert f"in {plan.memory.total / 1e9:.1f} of the 78.7 GB" in text


def test_the_published_mapping_is_as_far_behind_as_the_page_says():
    plans = [predict(row, fit(row.system)) for row in MAPPINGS["mixtral-8x22b"][-1:]]
    first = re.search(r"deepep .*?([\d.]+) s ", PAGE)
    assert first is not None
    assert isinstance(plans[0], Plan)
    behind = plans[0].cost.total / float(first[1]) - 1
    assert f"takes {behind:.0%} longer than the first" in PAGE


def test_the_number_of_layouts_is_what_the_page_says():
    number = sum(1 for _ in layouts(1440, HARDWARE["h800"].domain))
    assert f"1,440\n  devices among {number:,} layouts" in PAGE
