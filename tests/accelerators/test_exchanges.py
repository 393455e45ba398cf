"""Token dispatch between absent servers of H100s sends what the planner says."""

import json
import os
import subprocess
import sys

import pytest
from compilers import ROOT, needs_compiler
from tiers import full_but


@needs_compiler("cuda")
@pytest.mark.parametrize(
    "method", full_but(["all_to_all", "two_level", "two_level_ragged"], "two_level")
)
def test_a_compiled_layer_sends_what_is_planned(method, tmp_path):
    path = tmp_path / "exchanges.json"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.absent.exchanges", "--only", method, "--out", str(path)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (row,) = json.loads(path.read_text())
    assert row["compiled"] == row["planned"]
    assert row["compiled"]["across"] > 0
