"""Every notebook runs from its first cell to its last."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


def outputs(path):
    """All that the cells have put out."""
    cells = json.loads(path.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", ())]


def it_learns(path):
    """Each phase by more than chance: an accuracy of 2,048 answers has an error below 0.02."""
    printed = "".join("".join(output["text"]) for output in outputs(path) if "text" in output)
    number = r"\s+(\d\.\d+)"
    rows = re.findall(rf"(?m)^(untrained|warm start|trained){number}{number}", printed)
    accuracy = {policy: float(sampled) for policy, _, sampled in rows}
    assert list(accuracy) == ["untrained", "warm start", "trained"]
    assert accuracy["untrained"] < 0.05
    assert accuracy["warm start"] > accuracy["untrained"] + 0.1
    assert accuracy["trained"] > accuracy["warm start"] + 0.1


def it_learns_from_its_reward(path):
    """By more than chance: an accuracy of some 130 answers has an error below 0.045."""
    printed = "".join("".join(output["text"]) for output in outputs(path) if "text" in output)
    (found,) = re.findall(r"held-out accuracy (\d\.\d+) -> (\d\.\d+)", printed)
    before, after = map(float, found)
    assert after > before + 0.1
    for failure in ("not_finite", "invalid", "error"):
        assert f"verifier/{failure}\n" in printed


LOOKED_OVER = {"train": it_learns, "your_own_reward": it_learns_from_its_reward}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    # In a process of its own: a kernel brings threads and warnings that are not ours.
    executed = tmp_path / path.name
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "jupyter",
            "execute",
            str(path),
            f"--output={executed}",
            "--timeout=300",
        ],
        cwd=tmp_path,
        # Compiled as users do: hundreds of steps win back what the compiler's passes cost.
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert any("image/png" in output.get("data", ()) for output in outputs(executed))
    if path.stem in LOOKED_OVER:
        LOOKED_OVER[path.stem](executed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_was_run_as_it_stands(path):
    """The outputs that readers see without running anything: whole, in order, without an error."""
    cells = json.loads(path.read_text())["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert all(output["output_type"] != "error" for output in outputs(path))
    assert path.stat().st_size < 500_000
