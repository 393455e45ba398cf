"""The warm start: what it imitates, when it ends, and what it says."""

import itertools
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from annotations import unchecked
from small_runs import (
    PROMPTS,
    begin_or_go_on,
    fresh_weights,
    small_run,
    small_setup,
)

from jrl.report.evaluation import MODES
from jrl.rollout.sampler import Sampler
from jrl.tasks.data.prompt_list import FiniteTask, PromptList
from jrl.tasks.task import Example
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Worker
from jrl.trainer import loop
from jrl.trainer import step as stepping
from jrl.trainer import supervised as warming
from jrl.trainer.learner import update as of_update
from jrl.trainer.learner.metrics import Outcome
from jrl.trainer.supervised import (
    CHECK_EVERY,
    WarmStartFailed,
    shortfall,
    supervised_batch,
    warm_start,
)


@pytest.mark.slow
def test_warm_start_stops_at_its_target():
    """At the first measurement if any accuracy will do; else at the last step."""
    setup = small_setup(run=small_run(warm_start_steps=99, warm_start_accuracy=0.0))
    reports = []
    weights = fresh_weights(setup)
    learned, metrics = warm_start(
        setup, setup.sampler(), weights, lambda *given: reports.append(given)
    )
    assert metrics["warm_start/steps"] == CHECK_EVERY
    assert [step for step, _, _ in reports] == [CHECK_EVERY]
    assert reports[0][1:] == (metrics["warm_start/loss"], metrics["warm_start/accuracy"])
    _, again = warm_start(setup, setup.sampler(), weights, lambda *given: None)
    assert again == metrics
    chex.assert_tree_all_finite(weights.embedding)
    assert not np.array_equal(learned.embedding, weights.embedding)

    last = CHECK_EVERY + 2
    far = small_setup(run=small_run(warm_start_steps=last, warm_start_accuracy=1.0))
    _, metrics = warm_start(far, far.sampler(), weights, lambda *given: reports.append(given))
    assert metrics["warm_start/steps"] == last
    assert [step for step, _, _ in reports] == [CHECK_EVERY, CHECK_EVERY, last]


def test_a_supervised_batch_is_filled_up_with_rows_that_do_not_count():
    setup = small_setup(run=small_run(layout="dp3"))
    examples = [setup.task.train(index) for index in range(8)]
    batch = jax.device_get(supervised_batch(setup, examples, 9))
    alone = jax.device_get(supervised_batch(small_setup(), examples, 8))
    assert (len(batch.mask), len(alone.mask)) == (9, 8)
    assert not batch.mask[8].any()
    assert not batch.valid[8].any(), "routers are balanced by tokens that nobody wrote"
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:8], batch), alone)


def test_a_warm_start_far_below_its_target_says_so():
    run = small_run(warm_start_steps=70, warm_start_accuracy=0.4, warm_start_learning_rate=1e-3)
    line = shortfall(run, {"warm_start/accuracy": 0.125, "warm_start/steps": 70.0})
    assert line is not None and "\n" not in line
    assert "reached an accuracy of 0.125 in 70 steps, far below its target of 0.4" in line
    assert "--warm-start-steps (now 70)" in line
    # What is left to the target may be chance in the batch that was measured.
    assert shortfall(run, {"warm_start/accuracy": 0.31, "warm_start/steps": 70.0}) is None


def test_warm_start_learns():
    setup = small_setup(run=small_run(warm_start_steps=150, warm_start_accuracy=0.6))
    weights = fresh_weights(setup)
    losses = []
    _, metrics = warm_start(
        setup, setup.sampler(), weights, lambda step, loss, accuracy: losses.append(loss)
    )
    assert losses[-1] < losses[0]
    assert metrics["warm_start/accuracy"] >= 0.6


def test_warm_start_draws_no_heldout_prompt(monkeypatch):
    setup = small_setup(run=small_run(warm_start_steps=3))
    drawn = []
    task = type(setup.task)
    train = task.train
    monkeypatch.setattr(
        task, "train", lambda self, index: drawn.append(index) or train(self, index)
    )
    monkeypatch.setattr(task, "heldout", lambda self, index: pytest.fail("a held-out prompt"))
    warm_start(setup, setup.sampler(), fresh_weights(setup), lambda *given: None)
    # Three batches, and one that was not learned from.
    assert drawn == list(range(4 * setup.run.warm_start_batch))


class FirstStep(Exception):
    """A run has come to its first step."""


def listed_task():
    """What a list of twenty prompts makes: some held out, the others in an order for each pass."""
    words = ["".join(digits) for digits in itertools.product("012", repeat=3)][:20]
    examples = [Example(f"{word}=", max(word) + "=") for word in words]
    nobody = Pool(lambda: Worker(["false"]), 1)
    return FiniteTask(PromptList("listed", examples, 0), nobody, lambda example, completion: {})


@pytest.mark.parametrize("task", [None, listed_task()], ids=["endless", "a list"])
@unchecked()
def test_reinforcement_goes_on_after_the_prompts_that_were_imitated(task, tmp_path, monkeypatch):
    """Three steps of a warm start, on four prompts each, and then the first four of the run."""
    setup = small_setup(run=small_run(warm_start_steps=3, warm_start_batch=4, eval_prompts=2))
    setup = setup if task is None else replace(setup, task=task)
    imitated, given, evaluated = [], [], []

    def learn(objective, optimizer, num_micro, learner, batch, *_):
        return learner, Outcome(0.0, 0.0, True, False)

    def first_step(sampler, recipe, mesh, prompts_seen, unfinished):
        given.extend(setup.task.train(prompts_seen + i) for i in range(PROMPTS))
        raise FirstStep

    def measured(sampler, sampling, examples, on_sampled):
        evaluated.append(examples)
        names = (f"{what}/{mode}" for what in ("accuracy", "score") for mode in MODES)
        return {f"val/{name}": 0.0 for name in names} | {"timing_s/testing": 0.0}

    monkeypatch.setattr(of_update, "update", learn)
    monkeypatch.setattr(warming, "supervised_batch", lambda _, shown, __: imitated.extend(shown))
    monkeypatch.setattr(Sampler, "sample", lambda *_: [])
    monkeypatch.setattr(warming, "accuracy", lambda _: 0.0)
    monkeypatch.setattr(loop, "heldout_metrics", measured)
    monkeypatch.setattr(loop, "write_heldout_samples", lambda *_: None)
    monkeypatch.setattr(stepping, "collect", first_step)
    for _ in range(2):  # at once, and resumed from the checkpoint
        with pytest.raises(FirstStep):
            begin_or_go_on(setup, tmp_path / "run")
    assert imitated == [setup.task.train(i) for i in range(12)]
    assert given == [setup.task.train(12 + i) for i in range(PROMPTS)] * 2
    if task is not None:
        assert len({example.prompt for example in imitated + given}) == 12 + PROMPTS
    assert evaluated == [[setup.task.heldout(0), setup.task.heldout(1)]]


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_warm_start_fails_aloud(spoilt):
    setup = small_setup(run=small_run(warm_start_steps=2))
    weights = fresh_weights(setup)
    weights = weights.replace(norm=weights.norm * np.float32(spoilt))
    with pytest.raises(WarmStartFailed, match=r"2 of 2 steps .* lower --warm-start-learning-rate"):
        warm_start(setup, setup.sampler(), jax.tree.map(lambda x: x, weights), lambda *given: None)
