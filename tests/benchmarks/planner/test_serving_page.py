"""The page of the server's plan shows what its commands print, and says what they mean."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.planner.serving import published
from benchmarks.planner.serving.__main__ import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "serving_plan.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"(?m)^python -m benchmarks\.planner\.serving (.*)$", PAGE)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_page_shows_the_answer(number, capsys):
    words = shlex.split(COMMANDS[number])
    if "--picture" in words:
        words = words[: words.index("--picture")]
    assert main(words) == 0
    assert capsys.readouterr().out.rstrip() in PAGE
    assert len(COMMANDS) == 2


@pytest.mark.slow
def test_the_page_shows_what_is_published():
    assert published.comparison_tables() in PAGE


def row(*start):
    (found,) = [
        line.split() for line in PAGE.splitlines() if line.split()[: len(start)] == [*start]
    ]
    return found


@pytest.mark.parametrize(("slo", "gain"), [("150", "1.09"), ("100", "1.27"), ("75", "1.69")])
def test_the_gains_in_the_text_are_those_of_the_table(slo, gain):
    assert row("scaled-moe", slo, "ms")[4] == gain
    assert gain in PAGE[PAGE.index("**Why not 1.90") : PAGE.index("**For the price**")]


def test_the_other_numbers_in_the_text():
    assert row("scaled-moe", "50", "ms")[4] == "none"
    assert float(row("scaled-moe", "150", "ms")[5]) < 1.05  # attention replicated: no better
    text = PAGE[PAGE.index("**Communication takes longer") :]
    assert "The second micro-batch brings 1.99" in text
    for model in published.MODELS:
        ratio, second, _, third = PAGE[PAGE.index(f"\n{model} ") :].split()[1:5]
        assert (second, third) == ("1.99", "1.49")
        assert float(ratio) > 0.5
    table = PAGE[PAGE.index("T_c / T_f, and with other adapters") :].splitlines()[2:5]
    _, *columns = zip(*(line.split() for line in table), strict=True)
    own, without_latency, twice, said = ([float(cell) for cell in column] for column in columns)
    changes = [abs(b / a - 1) for a, b in zip(own, without_latency, strict=True)]
    assert max(changes) < 0.1
    over = [a / b for a, b in zip(twice, said, strict=True)]
    assert f"{min(over):.1f} to {max(over):.1f} times as large" in text
    for model in published.MODELS:
        assert row(model, "h20", "l40s")[3] > "1"  # H20 for attention, L40S for experts
        assert float(row(model, "h20", "l40s")[4]) > published.PUBLISHED_PER_COST


@pytest.mark.slow
def test_between_which_limits_on_time_the_published_gain_lies():
    gains = []
    for slo in (0.070, 0.075):
        plan, (one_group, *_) = published.gains("scaled-moe", slo)
        assert plan is not None and one_group is not None
        gains.append(plan.per_device / one_group.per_device)
    assert gains[0] > published.PUBLISHED_PER_DEVICE["scaled-moe"] > gains[1]
