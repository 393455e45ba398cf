"""Whole runs of every recipe: what they leave behind, and how they end."""

import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import chex
import jax
import numpy as np
import pytest
from annotations import unchecked
from small_runs import (
    begin_or_go_on,
    finish,
    fresh_state,
    fresh_weights,
    metrics_of,
    one_step,
    small_recipe,
    small_run,
    small_setup,
)
from tiers import full_but

from jrl.report.metrics import check_defined, is_timing, without_timings
from jrl.rollout import sampler as sampling
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.runs.records import read_metrics
from jrl.tasks.task import CORRECT, WRONG
from jrl.trainer import loop, outputs
from jrl.trainer import step as stepping
from jrl.trainer.loop import NonFiniteRun

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
    "training/empty_skipped",
    "training/empty_skipped_total",
    "verifier/correct",
    "verifier/unparsable",
    "frac_reward_zero_std",
    "perf/prefill_repeated",
}
OF_GROUPS = {"frac_reward_zero_std"}
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
    "sampling/k3_kl",
    "sampling/drift_alarm",
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


# The others are `grpo` with another advantage or loss, which the contract of recipes looks at.
IN_THEIR_OWN_WAY = ["grpo", "ppo", "dapo", "vapo", "tppo", "hapo", "reinforce_plus_plus", "gspo"]


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(IN_THEIR_OWN_WAY, "grpo"))
def test_what_a_run_leaves_behind(name, finished):
    run = finished(name)
    assert run.outcome == loop.Outcome(step=3, stopped=False)
    lines = read_metrics(run.folder.metrics_path)
    assert [line.pop("step") for line in lines] == [0, 1, 2, 3]
    for line in lines:
        check_defined(line)
    assert lines[0].keys() >= {"warm_start/loss", "warm_start/accuracy", "warm_start/steps"}
    for step, line in enumerate(lines):
        assert ("val/accuracy/sampled" in line) == (step in (0, 2, 3))
    pretraining = run.setup.recipe.value_pretraining_steps
    for step, line in enumerate(lines[1:], start=1):
        learned = step > pretraining
        # Rows that are written in windows stand in no groups.
        whole = run.setup.recipe.has_complete_groups
        assert line.keys() >= (EVERY_STEP if whole else EVERY_STEP - OF_GROUPS)
        assert (line.keys() >= OF_POLICY) == learned
        assert (line.keys() >= OF_CRITIC) == run.setup.recipe.uses_critic
        assert line["training/optimizer_steps"] == 2 * learned
        assert line["perf/prefill_repeated"] == 0  # buffers have room for any routing
        if learned:
            assert line["sampling/sampling_logp_difference/max"] < 1e-5
            assert abs(line["sampling/k3_kl"]) < 1e-6  # of log-ratios rounded at 1e-7
            assert line["sampling/drift_alarm"] == 0
            assert line["actor/grad_norm"] > 0
        assert any(is_timing(metric) for metric in line)
        chex.assert_tree_all_finite(line)
    total = sum(line["training/tokens"] for line in lines[1:])
    assert lines[-1]["training/total_tokens"] == total
    assert Checkpoints(run.folder.checkpoints_path).steps() == [2, 3]


@pytest.mark.slow
def test_a_run_ends_with_pictures(finished, pictures, tmp_path):
    setup = replace(finished("vapo").setup, run=small_run(steps=1, warm_start_steps=0))
    begin_or_go_on(setup, tmp_path / "run")
    assert (tmp_path / "run" / "plots" / "overview.png").is_file()


@unchecked()
def test_a_drift_of_the_sampler_is_shown_where_it_begins():
    shown = []
    display: Any = SimpleNamespace(alarm=shown.append)
    nothing: Any = None
    opened = outputs.Outputs(nothing, nothing, [], display, {}, {}, drifted=False)
    for step, (kl, alarm) in enumerate([(0.001, 0.0), (0.5, 1.0), (0.6, 1.0), (0.0, 0.0)]):
        opened.warn_of_drift(step, {"sampling/k3_kl": kl, "sampling/drift_alarm": alarm})
    opened.warn_of_drift(4, {})
    opened.warn_of_drift(5, {"sampling/k3_kl": 0.25, "sampling/drift_alarm": 1.0})
    began = [line.split(":")[0] for line in shown]
    assert began == ["step 1", "step 5"]
    assert "sampling/k3_kl is 0.5 nats" in shown[0]


@unchecked()
def test_a_suspicion_is_shown_once_with_its_samples():
    """A policy that repeats the sum that it is asked for, before a verifier that works it out."""
    shown, written = [], []
    display: Any = SimpleNamespace(alarm=shown.append)
    samples: Any = SimpleNamespace(append=lambda step, record: written.append((step, record)))
    nothing: Any = None
    opened = outputs.Outputs(nothing, samples, [], display, {}, {}, drifted=False)

    def completion(prompt, text, verdict):
        return SimpleNamespace(
            trajectory=SimpleNamespace(request=SimpleNamespace(prompt=prompt, conversation=None)),
            example=SimpleNamespace(answer="42"),
            text=text,
            verdict=verdict,
            correct=verdict.correct,
            record=lambda format: {"completion": text},
        )

    rows = [completion(0, "42", CORRECT), completion(0, "17 + 25", CORRECT)]
    rows += [completion(1, "40 + 2", CORRECT), completion(2, "41", WRONG)]
    rows += [completion(prompt, "42", CORRECT) for prompt in (3, 4, 5)]
    done: Any = SimpleNamespace(collected=SimpleNamespace(completions=rows))
    values = []
    for step in range(1, 16):
        late = 0.4 * (step > 10)
        metrics = {"critic/score/mean": 0.1 + late, "answers/shared": 0.1, "answers/disputed": late}
        if opened.warn_of_suspicion(step, metrics):
            opened.write_suspicious(nothing, step, done)
        values.append(metrics["reward/suspicion"])
    assert values == [0.0] * 10 + [1.0] * 5
    assert len(shown) == 1
    assert shown[0].startswith("step 11: a second verifier, which compares numbers as text")
    texts = [record["completion"] for _, record in written]
    assert {(step, record["kind"]) for step, record in written} == {(11, "suspicious")}
    # One of each prompt, and those first that the second reader does not share.
    assert texts == ["17 + 25", "40 + 2", "42", "42"]
    steps_without_scores: dict[str, float] = {}
    assert not opened.warn_of_suspicion(16, steps_without_scores)
    assert steps_without_scores == {}


@pytest.mark.slow
def test_speed_leaves_evaluation_and_samples_out(tmp_path, monkeypatch):
    """On a clock that says two seconds for a step, a thousand for an evaluation and a hundred for
    scoring what is shown."""
    now, step, evaluate = [0.0], loop.train_step, loop.heldout_metrics

    def lasting(seconds, function):
        def lasts(*arguments, **options):
            result = function(*arguments, **options)
            now[0] += seconds
            return result

        return lasts

    monkeypatch.setattr(loop, "train_step", lasting(2.0, step))
    monkeypatch.setattr(loop, "heldout_metrics", lasting(1000.0, evaluate))
    monkeypatch.setattr(stepping, "token_records", lasting(100.0, stepping.token_records))
    for module in (loop, sampling):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    settings = {"steps": 2, "eval_every": 1, "samples_every": 2, "sample_tokens": 4}
    run = finish("grpo", tmp_path / "run", warm_start_steps=0, **settings)
    lines = read_metrics(run.folder.metrics_path)[1:]
    assert [line.get("timing_s/samples") for line in lines] == [None, 100.0]
    for line in lines:
        assert "val/accuracy/sampled" in line and line["perf/time_per_step"] == 2.0
        assert line["perf/total_num_tokens"] == line["training/tokens"]
        assert line["perf/tokens_per_second"] == line["training/tokens"] / 2


def test_speed_is_that_of_all_devices_and_of_each():
    setup = small_setup(run=small_run(layout="dp2"))
    speed = loop._throughput_metrics(setup, tokens=18.0, seconds=3.0)
    assert (speed["perf/tokens_per_second"], speed["perf/throughput"]) == (6.0, 3.0)
    apart = small_setup(run=small_run(layout="dp2", max_staleness=1, rollout_devices=1))
    assert loop._throughput_metrics(apart, tokens=18.0, seconds=3.0)["perf/throughput"] == 2.0


@pytest.mark.slow
def test_samples(finished):
    samples = finished("grpo").samples
    kinds = [(line["step"], line["kind"]) for line in samples]
    assert kinds == [(0, "heldout")] * 4 + [(2, "training")] * 4 + [(3, "heldout")] * 4
    assert [line["prompt"] for line in samples[:4]] == [line["prompt"] for line in samples[8:]]
    for line in samples:
        # A line of training has the figures of its tokens too.
        assert line.keys() - ({"tokens"} if line["kind"] == "training" else set()) == {
            "step", "kind", "prompt", "answer", "completion",
            "score", "reason", "length", "truncated",
        }  # fmt: skip


@pytest.mark.slow
def test_learning_rate_and_counters(finished):
    """Two optimizer steps per step, of which the third is the last of the warm-up."""
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


@pytest.mark.slow
def test_checkpoints_are_bounded(tmp_path):
    run = finish(
        "grpo", tmp_path / "run", warm_start_steps=0, checkpoint_every=1, keep_checkpoints=1
    )
    assert Checkpoints(run.folder.checkpoints_path).steps() == [3]
    assert "warm_start/loss" not in run.metrics[0]


@pytest.mark.slow
def test_who_asks_is_told_each_step_as_it_is_written(tmp_path):
    setup, told = small_setup(run=small_run(steps=2, warm_start_steps=0)), []
    with RunFolder.create(tmp_path / "run", {}) as folder:

        def on_step(step, metrics):
            assert read_metrics(folder.metrics_path)[-1] == {"step": step, **metrics}
            told.append(step)

        loop.train(setup, folder, on_step=on_step)
        assert told == [0, 1, 2]
        # A run that goes on tells what is new: all is done here.
        loop.train(setup, folder, on_step=on_step)
    assert told == [0, 1, 2]


@pytest.mark.slow
def test_given_weights_skip_the_warm_start(tmp_path):
    setup = small_setup(run=small_run(steps=1))
    weights = fresh_weights(setup)
    with RunFolder.create(tmp_path / "run", {}) as folder:
        loop.train(setup, folder, weights)
    assert "warm_start/loss" not in metrics_of(tmp_path / "run")[0]
    # They are still the caller's.
    chex.assert_tree_all_finite(weights.embedding)


@pytest.mark.slow
def test_weights_that_are_handed_over_are_not_kept(tmp_path):
    setup = small_setup(run=small_run(steps=1))
    weights, kept = [fresh_weights(setup)], []
    reference = weakref.ref(weights[0].embedding)

    def on_step(step, metrics):
        gc.collect()
        kept.append(reference() is not None)

    with RunFolder.create(tmp_path / "run", {}) as folder:
        loop.train(setup, folder, weights.pop, on_step=on_step)
    assert kept == [False, False]


@pytest.fixture
def advantages_are_nan(monkeypatch):
    made = stepping.prepare

    def spoilt(*arguments):
        batch, prepared = made(*arguments)
        return batch.replace(advantages=batch.advantages * np.float32(np.nan)), prepared

    monkeypatch.setattr(stepping, "prepare", spoilt)


@pytest.mark.slow
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
        chex.assert_tree_all_finite(batch["old_logprobs"])


@pytest.mark.slow
def test_pretraining_moves_the_critic_alone(tmp_path):
    """The first step of VAPO here: the policy is bit for bit what it was."""
    setup = small_setup(small_recipe("vapo", pretrain_critic=2), small_run(warm_start_steps=0))
    state = fresh_state(setup, fresh_weights(setup))
    policy, critic = jax.device_get((state.policy, state.critic))
    for _ in range(2):
        state, done = one_step(setup, state)
        metrics = done.metrics
        assert "actor/loss" not in metrics and "critic/vf_loss" in metrics
        # Sampler and trainer are compared in these steps too: float32 sums in another order.
        difference = metrics["sampling/sampling_logp_difference/max"]
        assert metrics["sampling/sampling_logp_difference/mean"] <= difference < 1e-5
    chex.assert_trees_all_equal(state.policy, policy)
    assert int(state.critic.updates) == 4
    assert not np.array_equal(state.critic.weights.embedding, critic.weights.embedding)
    state, _ = one_step(setup, state)
    assert int(state.policy.updates) == 2
    assert not np.array_equal(state.policy.weights.embedding, policy.weights.embedding)


@pytest.mark.slow
def test_a_step_without_tokens_learns_nothing(monkeypatch):
    """Pretraining of the critic first, then both: everything that was sampled is filtered out."""
    setup = small_setup(small_recipe("vapo", pretrain_critic=1), small_run(warm_start_steps=0))
    drawn = stepping.collect

    def filtered(*arguments):
        collected = drawn(*arguments)
        nothing = jax.numpy.zeros_like(collected.batch.mask)
        return replace(collected, batch=replace(collected.batch, mask=nothing))

    monkeypatch.setattr(stepping, "collect", filtered)
    state = fresh_state(setup, fresh_weights(setup))
    before = jax.device_get((state.policy, state.critic))
    for updates in (2, 4):  # two mini-batches, for one network and then for two
        state, done = one_step(setup, state)
        metrics = done.metrics
        assert metrics["training/empty_skipped"] == updates
        assert metrics["training/optimizer_steps"] == len(done.nonfinite) == 0
        check_defined(metrics)
        chex.assert_tree_all_finite(metrics)
        assert not {"actor/loss", "actor/entropy", "critic/vf_loss"} & metrics.keys()
    after = jax.device_get((state.policy, state.critic))
    kept = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), after, before)
    assert all(jax.tree.leaves(kept))


@pytest.mark.slow
def test_corrections_of_a_sampler_that_is_right_change_nothing():
    """On two devices, against a plain step on one: all weights are 1 and nothing is rejected."""
    found = []
    for layout, settings in (
        ("dp1", {}),
        (
            "dp2",
            {"old_logprobs": "recompute", "mismatch": "icepop", "rejection": "geometric"},
        ),
    ):
        run = small_run(warm_start_steps=0, layout=layout)
        setup = small_setup(small_recipe("grpo", **settings), run)
        state = fresh_state(setup, fresh_weights(setup))
        state, done = one_step(setup, state)
        check_defined(done.metrics)
        found.append((jax.device_get(state.policy.weights), without_timings(done.metrics)))
    (plain, expected), (corrected, metrics) = found
    # Decoding with a cache against one forward pass, and sums over devices: float32.
    chex.assert_trees_all_close(corrected, plain, rtol=1e-4, atol=5e-5)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-3, abs=1e-4), name
    added = metrics.keys() - expected.keys()
    assert all(name.startswith("rollout_corr/") for name in added)
    for name in added:
        of_ratios = ("_is_mean", "_is_min", "_is_max", "_is_eff_sample_size")
        assert metrics[name] == pytest.approx(float(name.endswith(of_ratios)), abs=1e-4), name


# `tests/jrl/rollout/test_scoring.py` has the same with no trainer.
@pytest.mark.slow
def test_sampler_and_trainer_agree_on_a_narrowed_distribution():
    """Temperature and top-p: what was sampled from is what the trainer reckons with."""
    recipe = small_recipe("grpo", temperature=0.8, top_p=0.9)
    setup = small_setup(recipe, small_run(warm_start_steps=0))
    state = fresh_state(setup, fresh_weights(setup))
    _, done = one_step(setup, state)
    metrics = done.metrics
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    rollout = jax.device_get(done.collected.batch)
    # The narrowed distribution gives its tokens more than the whole policy does.
    assert (rollout.behaviour_logprobs > rollout.old_logprobs)[rollout.mask].mean() > 0.5
    assert metrics["actor/ratio"] == pytest.approx(1.0, abs=0.2)
