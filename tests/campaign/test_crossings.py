"""Crossings of the campaign (`tests.campaign.crossings`) in the gate, and what finds failures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaign.comparing import outcome_of
from tests.campaign.drawing import drawn
from tests.campaign.shrinking import shrunk

SEED = 1


# A ring, pipelines, expert parallelism, adapters and sides of the rollout are among them.
@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 9, 10, 11, 13, 24, 25, 27])
def test_drawn_crossings_are_right(number):
    outcome = outcome_of(drawn(SEED, number))
    assert outcome.kind == "right", outcome.reason


@pytest.mark.parametrize("number", [0, 3, 4, 14])
def test_what_cannot_be_combined_is_refused_in_one_line(number):
    outcome = outcome_of(drawn(SEED, number))
    assert outcome.kind == "refused" and "\n" not in outcome.reason


def test_the_same_seed_draws_the_same():
    assert [drawn(SEED, n) for n in range(20)] == [drawn(SEED, n) for n in range(20)]
    assert drawn(SEED, 0) != drawn(SEED + 1, 0)


def test_a_failure_is_shrunk_to_what_it_needs():
    crossing = {
        "layout": {"tp": 2, "pp": 4},
        "run": {"context": "ring", "remat": "full"},
        "recipe": {"name": "vapo", "kl_coef": 0.1},
    }

    def fails(one):
        return one.get("layout", {}).get("pp", 1) > 1 and "context" in one.get("run", {})

    smallest, _ = shrunk(crossing, fails)
    assert smallest["layout"] == {"pp": 2} and smallest["run"] == {"context": "ring"}


@pytest.mark.slow
def test_the_command_prints_a_table_and_replays(tmp_path):
    root = Path(__file__).parents[2]
    crossing = json.dumps(drawn(SEED, 0))
    printed = subprocess.run(
        [sys.executable, "-m", "tests.campaign.crossings", "--replay", crossing],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "replayed: refused" in printed and "0 right, 1 refused, 0 failed" in printed
