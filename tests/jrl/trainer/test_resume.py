"""A run that was killed goes on as if it had not been, bit for bit."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from places import ROOT, SUPPORT
from small_runs import (
    begin_or_go_on,
    finish,
    fresh_state,
    fresh_weights,
    metrics_of,
    one_step,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.report.metrics import without_timings
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.runs.records import read, read_metrics
from jrl.trainer import loop, outputs
from jrl.trainer.learner import update as of_update
from jrl.trainer.state import abstract
from moe.execution import Execution


def run_killed(path, recipe, *moment):
    """Goes on with the run in another process, which kills itself at the moment."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "killed_run.py"), str(path), recipe, *map(str, moment)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done


# In the warm start; while the first checkpoint is written, which is then there or is not; when
# there are lines that no checkpoint has seen; and in a step. Steps 0, 2 and 3 save.
RANDOM = np.random.default_rng(0)
MOMENTS = [
    ("warm start", RANDOM.integers(1, 5), 0),
    ("checkpoint", 1, RANDOM.uniform(0.001, 0.1)),
    ("line", RANDOM.integers(7, 10), 0),
    ("step", 1, RANDOM.uniform(0.001, 0.05)),
]


# That a critic's state comes back is seen by `test_on_many_devices`.
@pytest.mark.slow
def test_killed_again_and_again(finished, tmp_path):
    expected = finished("grpo")
    path = tmp_path / "run"
    for moment in MOMENTS:
        killed = run_killed(path, "grpo", *moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert len(metrics_of(path)) < len(expected.metrics)
    assert begin_or_go_on(expected.setup, path) == loop.Outcome(step=3, stopped=False)
    assert metrics_of(path) == expected.metrics
    assert read(path / "samples.jsonl") == expected.samples
    assert Checkpoints(path / "checkpoints").steps() == [2, 3]


@pytest.mark.slow
def test_killed_with_a_checkpoint_in_flight(finished, tmp_path):
    """The run goes on from the checkpoint before; what it wrote meanwhile is written again."""
    expected, path = finished("grpo"), tmp_path / "run"
    killed = run_killed(path, "grpo", "write", 2, 2)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert len(metrics_of(path)) >= 3
    assert Checkpoints(path / "checkpoints").steps() == [0]
    assert begin_or_go_on(expected.setup, path) == loop.Outcome(step=3, stopped=False)
    assert metrics_of(path) == expected.metrics
    assert read(path / "samples.jsonl") == expected.samples
    assert sorted(entry.name for entry in (path / "checkpoints").iterdir()) == ["2", "3"]


@pytest.mark.slow
def test_killed_with_rows_in_flight(tmp_path):
    expected = finish("grpo", tmp_path / "whole", max_staleness=2, slots=6)
    path = tmp_path / "run"
    # In the first step, at the beginning of the second, and past the checkpoint after it.
    for moment in [("window", 12, 0), ("step", 2, 0.01), ("window", 16, 0.002)]:
        killed = run_killed(path, "grpo:2", *moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert begin_or_go_on(expected.setup, path) == loop.Outcome(step=3, stopped=False)
    assert metrics_of(path) == expected.metrics
    assert read(path / "samples.jsonl") == expected.samples


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tppo", "hapo"])
def test_killed_in_mid_rollout(recipe, finished, tmp_path):
    """With responses that go on between steps, and with entropy that the next step samples by."""
    expected, path = finished(recipe), tmp_path / "run"
    killed = run_killed(path, recipe, "step", 3, 0.02)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert len(metrics_of(path)) == 3
    assert begin_or_go_on(expected.setup, path) == loop.Outcome(step=3, stopped=False)
    assert metrics_of(path) == expected.metrics
    assert read(path / "samples.jsonl") == expected.samples


@pytest.mark.slow
def test_prompts_run_again_as_often(tmp_path):
    """Where sampling is not dynamic, though no metric of speed need be the same."""
    again = []
    for steps in ([2], [1, 2]):
        path = tmp_path / str(len(steps))
        for number in steps:
            run = small_run(steps=number, warm_start_steps=0)
            setup = small_setup(run=run)
            tight = small_model(setup.tokenizer.vocab_size, execution=Execution(buffer_factor=0.01))
            begin_or_go_on(replace(setup, model=tight), path)
        lines = read_metrics(path / "metrics.jsonl")
        again.append([line["perf/prefill_repeated"] for line in lines[1:]])
    # Of the first step's prompts there are fewer tokens than a buffer has rows at least.
    assert again[0] == again[1] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_draws(
    number, finished, tmp_path, monkeypatch, capsys
):
    expected, path = finished("grpo"), tmp_path / "run"
    step, drawn = loop.train_step, []

    def interrupted(sampler, networks, state, *rest, **options):
        if int(state.step) == 0:
            os.kill(os.getpid(), number)
        return step(sampler, networks, state, *rest, **options)

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", interrupted)
        patch.setattr(outputs, "plot_run", lambda *given, title: drawn.append(given) or [])
        outcome = begin_or_go_on(expected.setup, path)
    is_interrupted = number == signal.SIGINT
    assert outcome == loop.Outcome(step=1, stopped=True, interrupted=is_interrupted)
    assert drawn == [(path / "metrics.jsonl", path / "plots")]
    # Ctrl-C leaves time for an evaluation, which is no line of the metrics.
    folder, said = RunFolder.read(path), capsys.readouterr().out
    assert ("val/score/greedy" in folder.metrics()[-1]) == is_interrupted
    assert ("step 1, the last one, was not evaluated" in said) != is_interrupted
    assert (path / "report.html").is_file()
    assert signal.getsignal(number) is before
    assert Checkpoints(path / "checkpoints").steps() == [0, 1]
    assert metrics_of(path) == expected.metrics[:2]
    assert begin_or_go_on(expected.setup, path) == loop.Outcome(step=3, stopped=False)
    assert metrics_of(path) == expected.metrics
    assert read(path / "samples.jsonl") == expected.samples
    # If there is nothing left to do, nothing is done.
    assert begin_or_go_on(expected.setup, path) == loop.Outcome(step=3, stopped=False)
    assert metrics_of(path) == expected.metrics
    assert read(path / "samples.jsonl") == expected.samples


@pytest.mark.slow
def test_checkpoints_by_minutes_change_nothing(finished, tmp_path):
    """A checkpoint after every step, each as long after the last one as it takes; the run goes on
    from the first."""
    expected, path = finished("grpo"), tmp_path / "run"
    run = replace(expected.setup.run, checkpoint_every=99, checkpoint_minutes=1e-9)
    setup = replace(expected.setup, run=run)
    assert begin_or_go_on(setup, path).step == 3
    checkpoints = path / "checkpoints"
    assert Checkpoints(checkpoints).steps() == [2, 3] and metrics_of(path) == expected.metrics
    shutil.rmtree(checkpoints / "3")
    assert begin_or_go_on(setup, path).step == 3
    assert metrics_of(path) == expected.metrics
    assert read(path / "samples.jsonl") == expected.samples


@pytest.mark.slow
def test_a_signal_ends_the_warm_start(finished, tmp_path, monkeypatch):
    """There is nothing to save yet; the run begins again, and is the same run."""
    expected, path = finished("grpo"), tmp_path / "run"
    update, calls = of_update.update, []

    def interrupted(*arguments):
        calls.append(arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(of_update, "update", interrupted)
        outcome = begin_or_go_on(expected.setup, path)
    assert outcome == loop.Outcome(step=0, stopped=True, saved=False, interrupted=True)
    assert len(calls) == 1
    assert not (path / "checkpoints").exists() and not (path / "metrics.jsonl").exists()
    assert begin_or_go_on(expected.setup, path) == loop.Outcome(step=3, stopped=False)
    assert metrics_of(path) == expected.metrics


@pytest.mark.slow
def test_a_signal_in_the_first_evaluation_saves(finished, tmp_path, monkeypatch):
    expected, path = finished("grpo"), tmp_path / "run"
    evaluate = loop.heldout_metrics

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "heldout_metrics", interrupted)
        outcome = begin_or_go_on(expected.setup, path)
    assert outcome == loop.Outcome(step=0, stopped=True, interrupted=True)
    assert Checkpoints(path / "checkpoints").steps() == [0]
    assert metrics_of(path) == expected.metrics[:1]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = tmp_path / "run"
    setup = small_setup(run=small_run(warm_start_steps=0, steps=1, eval_every=5))
    begin_or_go_on(setup, path)
    before = {file: file.read_bytes() for file in path.rglob("*.jsonl")}
    other = replace(setup, model=small_model(setup.tokenizer.vocab_size, d_expert=14))
    with pytest.raises(
        ValueError, match=r"is of another model: .*experts/down is .*10,20\].*14,20"
    ):
        begin_or_go_on(other, path)
    actor_critic = replace(setup, recipe=small_recipe("vapo"))
    with pytest.raises(ValueError, match=r"is of another model: missing critic/weights/"):
        begin_or_go_on(actor_critic, path)
    assert {file: file.read_bytes() for file in path.rglob("*.jsonl")} == before


@pytest.mark.slow
def test_on_many_devices(tmp_path):
    """A state that lies in pieces comes back in the same pieces, and the next step is the same."""
    setup = small_setup(small_recipe("vapo"), small_run(layout="tp2 dp2 / ep4"))
    state = fresh_state(setup, fresh_weights(setup))
    expected = jax.tree.leaves_with_path(state)
    found = jax.tree.leaves_with_path(abstract(setup.networks))
    for (path, leaf), (other_path, other) in zip(expected, found, strict=True):
        assert path == other_path
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim), jax.tree_util.keystr(path)

    state, _ = one_step(setup, state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    state, done = one_step(setup, state)
    again, _ = checkpoints.restore(1, abstract(setup.networks))
    again, done_again = one_step(setup, again)
    assert without_timings(done_again.metrics) == without_timings(done.metrics)
    chex.assert_trees_all_equal(again, state)
