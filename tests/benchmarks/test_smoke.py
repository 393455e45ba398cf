"""The benchmarks run: once, at a size that takes no time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import full_but

ROOT = Path(__file__).parents[2]


def smoke(name: str, figures: Path) -> str:
    """What the benchmark prints."""
    return printed(f"benchmarks/{name}.py", "--smoke", "--json", str(figures))


def printed(*arguments: str) -> str:
    """What Python prints, which must succeed."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", full_but(["depth", "grouped", "vocabulary"], "vocabulary"))
def test_a_benchmark_compares_and_writes_its_figures(name, tmp_path):
    figures = tmp_path / "figures.json"
    assert "ms" in smoke(name, figures)
    assert figures.stat().st_size > 100


@pytest.mark.slow
def test_rollouts_are_measured_with_slots_kept_full_and_in_batches(tmp_path):
    figures = tmp_path / "rollout.json"
    assert "kept full" in smoke("rollout", figures)
    heavy = json.loads(figures.read_text())["heavy tail"]
    used = heavy["utilisation"]
    assert used["kept full"] >= 0.9 > 0.5 > used["fixed"]


@pytest.mark.slow
def test_every_part_of_the_benchmark_for_accelerators_measures_something(tmp_path):
    smoke("gpu", tmp_path / "gpu.json")
    figures = json.loads((tmp_path / "gpu.json").read_text())
    measured = {one["part"] for one in figures if one.get("milliseconds", 0) > 0}
    parts = {"ceilings", "step", "experts", "dispatch", "products", "attention", "head", "decoding"}
    assert measured == parts
    # cuDNN and the matrix units of GPUs are on no CPU, and that is said; nothing else may fail.
    failed = {one["form"].split(",")[0]: one["failed"] for one in figures if "failed" in one}
    assert failed.pop("jax's kernel")
    assert {form.split()[0] for form in failed} == {"cudnn", "mosaic"}
    assert all("NVIDIA" in reason for reason in failed.values())
    # The kernels that can be interpreted were compared with float32.
    interpreted = [one for one in figures if one["form"].endswith("x 128, interpreted")]
    assert len(interpreted) == 4 and all(0 <= one["difference"] < 0.01 for one in interpreted)
    decoded = [one for one in figures if one["part"] == "decoding"]
    assert [one["slot_utilisation"] for one in decoded] == [1.0, pytest.approx(0.8, abs=0.1)]


@pytest.mark.slow
def test_a_step_and_decoding_alone_are_timed():
    one = ("--one", "tiny-dense", "--threads", "1", "--steps", "1")
    figures = json.loads(printed("benchmarks/grpo_step.py", *one))
    assert figures["decode"] > 0 and 0 < figures["gen"] < figures["step"]
    assert figures["active_parameters"] == figures["parameters"] > 400_000
