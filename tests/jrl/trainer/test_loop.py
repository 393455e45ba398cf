"""Whole runs of every recipe: what they leave behind, and how they end."""

import json

import jax
import numpy as np
import pytest
from small_runs import begin_or_go_on, finish, metrics_of, small_recipe, small_run, small_setup
from tiers import full_but

from jrl.recipes import RECIPES
from jrl.trainer import improve as improving
from jrl.trainer import loop
from jrl.trainer.checkpoints import Checkpoints
from jrl.trainer.loop import NonFiniteRun
from jrl.trainer.metrics import check_known, is_timing
from jrl.trainer.records import read_metrics
from jrl.trainer.run_folder import RunFolder
from jrl.trainer.state import initial_weights
from jrl.trainer.warm_start import CHECK_EVERY, WarmStartFailed, warm_start

EVERY_STEP = {
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "training/tokens",
    "training/total_tokens",
    "training/optimizer_steps",
    "training/nonfinite_skipped",
    "training/nonfinite_skipped_total",
    "verifier/correct",
    "verifier/unparsable",
    "frac_reward_zero_std",
}
OF_POLICY = {
    "actor/loss",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/grad_norm",
    "actor/lr",
    "moe/max_load",
    "moe/router_entropy",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
}
OF_CRITIC = {
    "critic/loss",
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vf_explained_var",
    "critic/vpred_mean",
    "critic/grad_norm",
    "critic/lr",
}


@pytest.mark.parametrize("name", full_but(RECIPES, "grpo"))
def test_what_a_run_leaves_behind(name, finished):
    run = finished(name)
    assert run.outcome == loop.Outcome(step=3, stopped=False)
    lines = read_metrics(run.folder.metrics_path)
    assert [line.pop("step") for line in lines] == [0, 1, 2, 3]
    for line in lines:
        check_known(line)
    assert lines[0].keys() >= {"warm_start/loss", "warm_start/accuracy", "warm_start/steps"}
    for step, line in enumerate(lines):
        assert ("val/accuracy/sampled" in line) == (step in (0, 2, 3))
    pretraining = run.setup.recipe.value_pretraining_steps
    for step, line in enumerate(lines[1:], start=1):
        learned = step > pretraining
        assert line.keys() >= EVERY_STEP
        assert (line.keys() >= OF_POLICY) == learned
        assert (line.keys() >= OF_CRITIC) == run.setup.recipe.uses_critic
        assert line["training/optimizer_steps"] == 2 * learned
        if learned:
            assert line["sampling/sampling_logp_difference/max"] < 1e-5
            assert line["actor/grad_norm"] > 0
        assert any(is_timing(metric) for metric in line)
        assert all(np.isfinite(value) for value in line.values())
    total = sum(line["training/tokens"] for line in lines[1:])
    assert lines[-1]["training/total_tokens"] == total
    assert Checkpoints(run.folder.checkpoints_path).steps() == [2, 3]
    assert list(run.folder.plots_path.glob("*.png"))


def test_samples(finished):
    samples = finished("grpo").samples
    kinds = [(line["step"], line["kind"]) for line in samples]
    assert kinds == [(0, "heldout")] * 4 + [(2, "training")] * 4 + [(3, "heldout")] * 4
    assert [line["prompt"] for line in samples[:4]] == [line["prompt"] for line in samples[8:]]
    for line in samples:
        assert line.keys() == {
            "step", "kind", "prompt", "completion", "score", "reason", "length", "truncated",
        }  # fmt: skip


def test_learning_rate_and_counters(finished):
    """Two optimiser steps per step, of which the third is the last of the warm-up."""
    rates = [line["actor/lr"] for line in read_metrics(finished("grpo").folder.metrics_path)[1:]]
    np.testing.assert_allclose(rates, np.array([2 / 3, 1, 1]) * 1e-2, rtol=1e-6)


@pytest.mark.slow
def test_learning_rates_of_policy_and_critic(finished):
    """The warm-up of the policy begins after the step of the critic alone."""
    of_vapo = read_metrics(finished("vapo").folder.metrics_path)[1:]
    critic = finished("vapo").setup.recipe.critic_learning_rate
    assert of_vapo[0].get("actor/lr") is None
    rates = [line["actor/lr"] for line in of_vapo[1:]]
    np.testing.assert_allclose(rates, np.array([2 / 3, 1]) * 1e-2, rtol=1e-6)
    assert [line["critic/lr"] for line in of_vapo] == [np.float32(critic)] * 3


# The command line has the same property in the quick tier.
@pytest.mark.slow
def test_the_same_seed_is_the_same_run(finished, tmp_path):
    first = finished("grpo")
    again = finish("grpo", tmp_path / "again")
    assert again.metrics == first.metrics
    assert again.samples == first.samples
    other = finish("grpo", tmp_path / "other", seed=1)
    assert other.metrics[1:] != first.metrics[1:]


def test_checkpoints_are_bounded(tmp_path):
    run = finish(
        "grpo", tmp_path / "run", warm_start_steps=0, checkpoint_every=1, keep_checkpoints=1
    )
    assert Checkpoints(run.folder.checkpoints_path).steps() == [3]
    assert "warm_start/loss" not in run.metrics[0]


def test_given_weights_skip_the_warm_start(tmp_path):
    setup = small_setup(run=small_run(steps=1))
    weights = initial_weights(setup, setup.model, "weights")
    with RunFolder.create(tmp_path / "run", {}) as folder:
        loop.train(setup, folder, weights)
    assert "warm_start/loss" not in metrics_of(tmp_path / "run")[0]
    # They are still the caller's.
    assert np.isfinite(np.asarray(weights.embedding)).all()


@pytest.fixture
def advantages_are_nan(monkeypatch):
    made = improving.experience_of

    def spoilt(setup, state, completions):
        experience, batch = made(setup, state, completions)
        return experience, batch.replace(advantages=batch.advantages * np.float32(np.nan))

    monkeypatch.setattr(loop, "experience_of", spoilt)


def test_updates_that_are_not_finite_stop_a_run(tmp_path, advantages_are_nan):
    """Two updates a step are left out, and three in a row are too many."""
    path = tmp_path / "run"
    setup = small_setup(run=small_run(steps=9, warm_start_steps=0, max_nonfinite=3, eval_every=9))
    message = rf"step 2: 4 updates of the policy in a row .*batches are in {path}/nonfinite"
    with pytest.raises(NonFiniteRun, match=message):
        begin_or_go_on(setup, path)
    lines = read_metrics(path / "metrics.jsonl")[1:]
    assert [line["training/nonfinite_skipped"] for line in lines] == [2, 2]
    assert [line["training/nonfinite_skipped_total"] for line in lines] == [2, 4]
    assert [line["training/optimizer_steps"] for line in lines] == [0, 0]
    assert all(np.isnan(line["actor/loss"]) for line in lines)
    raw = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert raw[1]["actor/loss"] == "NaN"
    names = sorted(file.name for file in (path / "nonfinite").iterdir())
    assert names == [f"{step}-{number}-actor.npz" for step in (1, 2) for number in (0, 1)]
    with np.load(path / "nonfinite" / names[0], allow_pickle=False) as batch:
        assert np.isnan(batch["loss"]) and "grad_norm" in batch
        assert batch["tokens"].shape == (4, setup.prompt_length + setup.response_length)
        assert np.isnan(batch["advantages"][batch["mask"]]).all()
        assert np.isfinite(batch["old_logprobs"]).all()


def test_warm_start_stops_at_its_target():
    """Where any accuracy will do, at the first measurement; else at the last step."""
    setup = small_setup(run=small_run(warm_start_steps=99, warm_start_accuracy=0.0))
    reports = []
    weights = initial_weights(setup, setup.model, "weights")
    learned, metrics = warm_start(setup, weights, lambda *given: reports.append(given))
    assert metrics["warm_start/steps"] == CHECK_EVERY
    assert [step for step, _, _ in reports] == [CHECK_EVERY]
    assert reports[0][1:] == (metrics["warm_start/loss"], metrics["warm_start/accuracy"])
    _, again = warm_start(setup, weights, lambda *given: None)
    assert again == metrics
    assert np.isfinite(np.asarray(weights.embedding)).all()
    assert not np.array_equal(learned.embedding, weights.embedding)

    last = CHECK_EVERY + 2
    far = small_setup(run=small_run(warm_start_steps=last, warm_start_accuracy=1.0))
    _, metrics = warm_start(far, weights, lambda *given: reports.append(given))
    assert metrics["warm_start/steps"] == last
    assert [step for step, _, _ in reports] == [CHECK_EVERY, CHECK_EVERY, last]


def test_warm_start_learns():
    setup = small_setup(run=small_run(warm_start_steps=150, warm_start_accuracy=0.6))
    weights = initial_weights(setup, setup.model, "weights")
    losses = []
    _, metrics = warm_start(setup, weights, lambda step, loss, accuracy: losses.append(loss))
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
    warm_start(setup, initial_weights(setup, setup.model, "weights"), lambda *given: None)
    # Three batches, and one that was not learned from.
    assert drawn == list(range(4 * 8))


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_warm_start_fails_aloud(spoilt):
    setup = small_setup(run=small_run(warm_start_steps=2))
    weights = initial_weights(setup, setup.model, "weights")
    weights = weights.replace(norm=weights.norm * np.float32(spoilt))
    with pytest.raises(WarmStartFailed, match=r"2 of 2 steps .* lower --warm-start-learning-rate"):
        warm_start(setup, jax.tree.map(lambda x: x, weights), lambda *given: None)


def test_pretraining_moves_the_critic_alone(tmp_path):
    """The first step of VAPO here: the policy is bit for bit what it was."""
    setup = small_setup(small_recipe("vapo", pretrain_critic=2), small_run(warm_start_steps=0))
    state = loop.begin(setup, initial_weights(setup, setup.model, "weights"))
    policy, critic = jax.device_get((state.policy, state.critic))
    for _ in range(2):
        state, _, metrics, _ = loop.train_step(setup, state)
        assert "actor/loss" not in metrics and "critic/vf_loss" in metrics
        # Sampler and trainer are compared in these steps too: float32 sums in another order.
        difference = metrics["sampling/sampling_logp_difference/max"]
        assert metrics["sampling/sampling_logp_difference/mean"] <= difference < 1e-5
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.policy), policy)
    assert int(state.critic.updates) == 4
    assert not np.array_equal(state.critic.weights.embedding, critic.weights.embedding)
    state, _, metrics, _ = loop.train_step(setup, state)
    assert int(state.policy.updates) == 2
    assert not np.array_equal(state.policy.weights.embedding, policy.weights.embedding)


def test_sampler_and_trainer_agree_on_a_narrowed_distribution():
    """Temperature and top-p: what was sampled from is what the trainer reckons with."""
    recipe = small_recipe("grpo", temperature=0.8, top_p=0.9)
    setup = small_setup(recipe, small_run(warm_start_steps=0))
    state = loop.begin(setup, initial_weights(setup, setup.model, "weights"))
    _, collected, metrics, _ = loop.train_step(setup, state)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    rollout = collected.kept.rollout
    # The narrowed distribution gives its tokens more than the whole policy does.
    assert (rollout.logprobs > rollout.policy_logprobs)[rollout.mask].mean() > 0.5
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=0.2)
