"""A step is few launches by whatever None selects, counted in programs for absent H100s."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import ROOT, needs_compiler

from benchmarks.absent.launches import BOUND, CASES


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Launches of each case, counted in a process of its own."""
    path: Path = tmp_path_factory.mktemp("launches") / "launches.json"
    # Tests compile with few optimisations and for many CPU devices; users do not.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.absent.launches", "--bounded", "--out", str(path)]
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return {(row["program"], row["form"]): row for row in json.loads(path.read_text())}


@pytest.mark.slow
@needs_compiler("cuda")
@pytest.mark.parametrize("case", [case for case in CASES if case.bound is not None], ids=str)
def test_a_program_has_few_launches(case, counted):
    """Groups that are not balanced need further turns of loops: one of each is counted."""
    row = counted[case.program, case.form]
    assert 0 < row["launches"] + row["per_turn"] < case.bound <= BOUND
