"""Every notebook runs from its first cell to its last."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    # In a process of its own: a kernel brings threads and warnings that are not ours.
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "jupyter",
            "execute",
            str(path),
            f"--output={tmp_path / path.name}",
            "--timeout=300",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert (tmp_path / path.name).exists()
