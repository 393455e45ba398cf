"""The benchmarks run: once, at a size that takes no time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["grouped", "vocabulary"])
def test_a_benchmark_compares_and_writes_its_figures(name, tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, f"benchmarks/{name}.py", "--smoke", "--json", str(figures)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert figures.stat().st_size > 100
    assert "ms" in done.stdout
