"""The benchmarks run: once, at a size that takes no time."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import jax
import pytest
from served import NETWORK, write_checkpoint

from benchmarks.gpu.decoding import bytes_of_column, bytes_of_step
from benchmarks.gpu.networks import network, weights_of
from benchmarks.gpu.parts import PARTS, chosen
from benchmarks.gpu.rows import Settings
from benchmarks.gpu.shapes import SMALL_DENSE

ROOT = Path(__file__).parents[2]


def smoke(name: str, figures: Path) -> str:
    """Output of the benchmark."""
    return printed(f"benchmarks/{name}.py", "--smoke", "--json", str(figures))


def printed(*arguments: str, wait: float = 300) -> str:
    """Output of a Python program, which must succeed."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=wait
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAMS = sorted(
    path
    for path in (ROOT / "benchmarks").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_ctrl_c_ends_a_benchmark_without_a_traceback(path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", interrupted)
    monkeypatch.setitem(sys.modules, "rlax", ModuleType("rlax"))  # a peer, not in every environment
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # the folder of a script
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 130


def test_the_page_has_every_benchmark():
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for path in PROGRAMS:
        if path.stem not in ("peer_generate", "peer_moe", "peer_real_model"):  # what others start
            folder, *below = path.relative_to(ROOT / "benchmarks").parts
            name = f"{folder}/" if below else folder
            assert f"| `{name}` |" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint", "depth", "grouped", "vocabulary"])
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
def test_gsm8k_is_evaluated_before_and_after_training_of_each_seed(tmp_path):
    network = replace(NETWORK, max_positions=512)
    checkpoint = write_checkpoint(tmp_path / "model", network=network)
    for split, count in (("train", 6), ("test", 5)):
        lines = [{"question": f"{n}+{count}?", "answer": f"#### {n + count}"} for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    out = tmp_path / "results" / "gsm8k"
    own = ("--model", str(checkpoint), "--data", str(tmp_path), "--out", str(out))
    own += ("--minutes", "1e-9", "--eval-problems", "3", "--seeds", "0", "1")
    sizes = ("--prompts", "2", "--group-size", "2", "--mini-batch", "4", "--response-length", "4")
    shown = printed("-m", "benchmarks.gsm8k", *own, "--", *sizes, "--verifiers", "1")
    assert "seed 1: evaluates greedily on the first 3 of 5 test problems" in shown
    results = json.loads(out.with_suffix(".json").read_text())
    assert [run["seed"] for run in results["runs"]] == [0, 1]
    for run in results["runs"]:
        first, last = run["points"]
        assert (first["step"], first["minutes"], first["sampled_tokens"]) == (0, 0.0, 0)
        assert last["step"] == 1 and 0 < last["minutes"] < last["wall_minutes"]
        assert 4 <= last["sampled_tokens"] <= 16 and 0 <= last["accuracy"] <= 1
        assert last["reward"] == run["steps"][0]["reward"]
    samples = (tmp_path / "results" / "gsm8k-samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in samples]
    assert [(row["seed"], row["step"]) for row in rows[::3]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert out.with_suffix(".png").stat().st_size > 1000


@pytest.mark.slow
def test_serving_is_measured_by_clients_that_stream(tmp_path):
    figures = tmp_path / "serve.json"
    assert "tokens/s" in smoke("serve", figures)
    (row,) = json.loads(figures.read_text())["jrl.serve"]
    assert row["clients"] == 2 and row["tokens/s"] > 0 < row["first p50"]


@pytest.mark.slow
def test_every_row_of_the_benchmark_for_accelerators_runs_on_a_cpu(tmp_path):
    """Each at a small size, or it says what it needs; none fails and none is left out."""
    shown = printed("-m", "benchmarks.gpu", "--minutes", "14", "--out", str(tmp_path), wait=900)
    (result,) = tmp_path.glob("gpu-*.json")
    figures = json.loads(result.read_text())
    rows = {(row["part"], row["row"], row["form"]): row for row in figures["rows"]}
    assert len(rows) == len(figures["rows"])
    settings = Settings(small=True, seed=0)
    listed = [
        (part, row.name, row.form) for part in chosen(None) for row in PARTS[part].rows(settings)
    ]
    assert list(rows) == listed
    assert not [row for row in rows.values() if "failed" in row or "left_out" in row]
    for (_, _, form), row in rows.items():
        if "mosaic" in form or form in ("cudnn", "jax's kernel"):
            assert row["needs"] == "an NVIDIA GPU"
        elif form in ("tokamax", "torch"):
            assert "needs" in row or row["milliseconds"] > 0
        elif row["part"] == "cases":
            assert row["difference"] < 0.01
        else:
            assert row["milliseconds"] > 0
        compared = ("grouped", "dispatch", "layer", "swiglu", "cached", "head")
        if row["part"] in compared and "needs" not in row:
            assert 0 <= row["difference"] < 0.01
    assert {row["form"] for row in rows.values()} >= {"interpreted", "simulated"}
    (grpo,) = [row for row in rows.values() if row["part"] == "grpo"]
    assert 0 < grpo["sampled_tokens"] <= 128
    decoded = rows["decode", "decode/0.6b dense/4 rows, tokens 1 to 6", "as it is"]
    config = network(SMALL_DENSE)
    weights = jax.eval_shape(partial(weights_of, config, 0, halved=True))
    # Each row of 4 tokens gets one when it comes, and is read at 5 to 9 tokens for the others.
    least = 5 * bytes_of_step(config, weights, 4)
    least += 4 * (5 + 6 + 7 + 8 + 9) * bytes_of_column(config)
    seconds = decoded["steps"] * decoded["milliseconds"] / 1e3
    assert decoded["steps"] == 5
    assert decoded["gigabytes_per_s"] * 1e9 * seconds == pytest.approx(least)
    assert decoded["tokens_per_s"] * seconds == pytest.approx(4 * 5)
    assert {one["verdict"] for one in figures["promises"]} == {"open"}
    page = result.with_suffix(".md").read_text()
    assert all(f"| {row} | {form} |" in page and row in shown for _, row, form in rows)


@pytest.mark.slow
def test_a_step_and_decoding_alone_are_timed():
    one = ("--one", "tiny-dense", "--threads", "1", "--steps", "1")
    figures = json.loads(printed("benchmarks/grpo_step.py", *one))
    assert figures["decode"] > 0 and 0 < figures["gen"] < figures["step"]
    assert figures["active_parameters"] == figures["parameters"] > 400_000


@pytest.mark.slow
def test_a_step_of_a_published_model_is_timed_by_phases(tmp_path):
    figures = tmp_path / "figures.json"
    shown = smoke("real_model", figures)
    for phase in ("prompt pass", "decoding", "forward", "backward", "head", "host"):
        assert f"\n{phase} " in shown
    result = json.loads(figures.read_text())
    assert result["product per processor second"] > 1e8 < result["read per processor second"]
    # Every completion has at least one token, and prompts count once for their completions.
    assert result["tokens"]["response"] >= result["rows"] == 4
    assert result["tokens"]["prompt"] == 2 * (1 + len("40754516="))


@pytest.mark.slow
def test_a_step_beside_trl_is_timed_without_the_peer(tmp_path):
    figures = tmp_path / "figures.json"
    shown = smoke("beside_trl", figures)
    result = json.loads(figures.read_text())
    assert shown.startswith("smoke ") and set(result["seconds"]) == {"smoke"}
    (step,) = result["seconds"]["smoke"]["jrl"]
    assert step["wall"] > 0 and step["processor"] > 0 and step["tokens"] >= 4
    assert result["machine"]["versions"] == {"jax": jax.__version__}
