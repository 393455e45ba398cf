"""The page of the planner shows what its commands print."""

import re
import shlex
from pathlib import Path

import pytest

from sharding.planner.__main__ import main
from sharding.planner.validation.calibration import compared

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")


def test_the_page_shows_what_is_predicted():
    assert compared() in PAGE


def test_the_page_shows_the_answer(capsys):
    (command,) = re.findall(r"(?m)^python -m sharding\.planner (.*)$", PAGE)
    words = shlex.split(command)
    assert main(words[: words.index("--picture")]) == 0
    assert capsys.readouterr().out.rstrip() in PAGE


@pytest.mark.parametrize(
    ("model", "gain"),
    [("mixtral-8x22b", 1.08), ("mixtral-8x22b-g8t8", 1.80), ("llama3-8x70b", 1.23)],
)
def test_the_gains_in_the_text_are_those_of_the_table(model, gain):
    rows = [line for line in PAGE.splitlines() if line.startswith(f"{model} ")][:4]
    without, folded = (float(re.sub(r" \(the point\)", "", row).split()[-1]) for row in rows[-2:])
    assert folded / without == pytest.approx(gain, abs=0.01)
    assert f"{gain:.2f}" in PAGE
