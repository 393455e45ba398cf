"""A step is few launches by whatever None selects, counted in programs for absent H100s."""

import json
import os
import subprocess
import sys

import pytest
from compilers import ROOT, needs_compiler

from benchmarks.absent.launches import BOUND, CASES

BOUNDED = [
    # The others have more layers, or more of the same.
    pytest.param(
        case, marks=() if str(case) == "experts layer, None" else pytest.mark.slow, id=str(case)
    )
    for case in CASES
    if case.bound is not None
]


@needs_compiler("cuda")
@pytest.mark.parametrize("case", BOUNDED)
def test_a_program_has_few_launches(case, tmp_path):
    """Groups that are not balanced need further turns of loops: one of each is counted."""
    path = tmp_path / "launches.json"
    # Tests compile with few optimisations and for many CPU devices; users do not.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.absent.launches", "--only", str(case)]
    done = subprocess.run(
        [*command, "--out", str(path)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (row,) = json.loads(path.read_text())
    assert 0 < row["launches"] + row["per_turn"] < case.bound <= BOUND
