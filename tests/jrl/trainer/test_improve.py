"""From completions to optimiser steps: which rows are learned from when, and what is reported."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import GROUP_SIZE, small_batch, small_recipe, small_run, small_setup
from tiers import full_but

from jrl.losses import ExplainedVariance, Mean
from jrl.recipes import RECIPES
from jrl.report.metrics import check_known
from jrl.trainer import improve as improving
from jrl.trainer.collect import Completions, collect
from jrl.trainer.improve import (
    count_updates,
    experience_of,
    improve,
    mini_batches,
    summarise,
)
from jrl.trainer.learner import Max
from jrl.trainer.state import begin, initial_weights

ROWS = 8


def state_of(setup, step=0):
    state = begin(setup, initial_weights(setup, setup.model, "weights"))
    return state.replace(step=state.step + step)


@pytest.fixture
def learned_from(monkeypatch):
    """The rows of each update, told by the tokens they begin with; nothing is updated."""
    updates: list[tuple[str, list[int]]] = []

    def record(objective, optimiser, num_micro, learner, batch):
        network = "actor" if hasattr(objective, "sampling") else "critic"
        updates.append((network, np.asarray(batch.tokens)[:, 0].tolist()))
        return learner, {"loss": 0.0, "grad_norm": 0.0, "finite": True, "empty": False}

    monkeypatch.setattr(improving, "update", record)
    return updates


def numbered(setup):
    """A batch of a whole step, with the number of each row for its first token."""
    batch = small_batch(setup, ROWS)
    return batch.replace(tokens=batch.tokens.at[:, 0].set(jnp.arange(ROWS, dtype=jnp.int32)))


def orders(learned_from, setup, step=0) -> Sequence[list[int]]:
    learned_from.clear()
    improve(setup, state_of(setup, step), numbered(setup))
    return [rows for network, rows in learned_from if network == "actor"]


def test_order_is_a_function_of_seed_step_and_epoch(learned_from):
    setup = small_setup(small_recipe(epochs=3))
    first = orders(learned_from, setup)
    assert [len(rows) for rows in first] == [4] * 6
    epochs = [first[i] + first[i + 1] for i in (0, 2, 4)]
    assert all(sorted(rows) == list(range(ROWS)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert orders(learned_from, setup) == first
    assert orders(learned_from, setup, step=1) != first
    other = small_setup(small_recipe(epochs=3), small_run(seed=1))
    assert orders(learned_from, other) != first
    # Fewer epochs are the beginning of more.
    assert orders(learned_from, small_setup(small_recipe(epochs=1))) == first[:2]


def test_rows_that_share_a_prompt_stay_together(learned_from):
    setup = small_setup(small_recipe(epochs=4))
    assert setup.rows.copies == GROUP_SIZE
    for rows in orders(learned_from, setup):
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(rows[::2], rows[1::2], strict=True))


def test_rows_go_alone_where_a_mini_batch_holds_no_whole_groups(learned_from):
    setup = small_setup(small_recipe(epochs=4, group_size=4, prompts=2, mini_batch=2))
    assert setup.rows.copies == 1
    rows = orders(learned_from, setup)
    assert any(part[0] // 4 != part[1] // 4 for part in rows)


def test_micro_batches_have_no_say_in_the_mini_batches(learned_from):
    setup = small_setup()
    state, batch = state_of(setup), numbered(setup)
    for group_size, mini_batch in ((2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8)):
        found = []
        for piece in [None, *(piece for piece in (1, 2, 4, 8) if mini_batch % piece == 0)]:
            sizes = {"group_size": group_size, "prompts": ROWS // group_size, "epochs": 2}
            recipe = small_recipe(**sizes, mini_batch=mini_batch, micro_batch=piece)
            learned_from.clear()
            improve(small_setup(recipe), state, batch)
            found.append([rows for _, rows in learned_from])
        assert [len(rows) for rows in found[0]] == [mini_batch] * (2 * ROWS // mini_batch)
        assert all(rows == found[0] for rows in found)


def test_the_default_step_shuffles_whole_groups():
    """64 prompts x 8 in mini-batches of 128: sixteen groups each, drawn as numpy permutes rows."""
    recipe = RECIPES["grpo"]()
    found = mini_batches(recipe, np.random.default_rng([0, 3, 0]))
    expected = np.random.default_rng([0, 3, 0]).permutation(np.arange(512).reshape(64, 8))
    np.testing.assert_array_equal(found, expected.reshape(4, 128))


@pytest.mark.slow
def test_micro_batches_have_no_say_in_what_is_learned():
    """A whole step in pieces of 4 rows and of 1, which holds no whole group."""
    steps = []
    for piece in (4, 1):
        setup = small_setup(small_recipe(micro_batch=piece))
        state, history, *_ = improve(setup, state_of(setup), small_batch(setup, ROWS))
        steps.append((jax.device_get(state.policy.weights), summarise(history)))
    (weights, metrics), (other_weights, other_metrics) = steps
    # Float32 sums in another order, divided by their own size where Adam's gradients are small.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), other_weights, weights
    )
    assert other_metrics.keys() == metrics.keys()
    for name in metrics.keys() - {"moe/padded_fraction"}:  # rows that share a prompt run it once
        assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("step", [0, 1])
def test_critic_and_policy_take_turns_after_pretraining(learned_from, step):
    setup = small_setup(small_recipe("vapo", pretrain_critic=1))
    improve(setup, state_of(setup, step), numbered(setup))
    networks = [network for network, _ in learned_from]
    assert networks == (["critic"] * 2 if step == 0 else ["critic", "actor"] * 2)
    critic = [rows for network, rows in learned_from if network == "critic"]
    actor = [rows for network, rows in learned_from if network == "actor"]
    assert not actor or actor == critic


def test_what_was_left_out_is_handed_over(learned_from, monkeypatch):
    def refuse(objective, optimiser, num_micro, learner, batch):
        loss = np.float32(np.nan)
        return learner, {"loss": loss, "grad_norm": 2.0, "finite": False, "empty": False}

    monkeypatch.setattr(improving, "update", refuse)
    setup = small_setup(small_recipe("vapo", pretrain_critic=0))
    _, history, nonfinite, _ = improve(setup, state_of(setup), numbered(setup))
    assert len(history) == 2
    assert [left_out.network for left_out in nonfinite] == ["critic", "actor"] * 2
    assert nonfinite[0].grad_norm == 2.0 and np.isnan(nonfinite[0].loss)
    assert nonfinite[0].batch.tokens.shape[0] == 4


@pytest.mark.parametrize("name", full_but(RECIPES, "grpo", "vapo"))
def test_a_reference_is_kept_only_where_it_is_needed(name):
    assert state_of(small_setup(small_recipe(name))).reference is None
    state = state_of(small_setup(small_recipe(name, kl_coef=0.1)))
    jax.tree.map(np.testing.assert_array_equal, state.reference, state.policy.weights)
    assert (state.critic is None) == (name in ("grpo", "dapo"))


def test_a_critic_starts_as_the_policy_that_values_nothing():
    state = state_of(small_setup(small_recipe("ppo")))
    critic, policy = state.critic.weights, state.policy.weights
    np.testing.assert_array_equal(critic.head, 0)
    jax.tree.map(np.testing.assert_array_equal, critic.layers, policy.layers)
    assert critic.embedding.unsafe_buffer_pointer() != policy.embedding.unsafe_buffer_pointer()


@pytest.fixture(scope="module")
def sampled():
    """The completions of one step, with scores that differ between the groups."""
    setup = small_setup()
    weights = initial_weights(setup, setup.model, "weights")
    kept = collect(setup, weights, step=0, cursor=0).kept
    scores = [0.0, 0.5, 1.0, 0.5, 0.0, 0.0, 1.0, 1.0]
    reasons = {1.0: "correct", 0.5: "partial", 0.0: "wrong"}
    verdicts = [type(kept.verdicts[0])(score, reasons[score]) for score in scores]
    return Completions(kept.rollout, kept.groups, kept.examples, kept.texts, verdicts, kept.lengths)


def test_experience(sampled):
    setup = small_setup()
    experience, batch, _ = experience_of(setup, state_of(setup), sampled)
    np.testing.assert_array_equal(experience.rewards, sampled.scores)
    np.testing.assert_array_equal(experience.lengths, sampled.rollout.mask.sum(axis=1))
    np.testing.assert_array_equal(batch.correct, sampled.scores == 1)
    np.testing.assert_array_equal(batch.old_logprobs, sampled.rollout.policy_logprobs)
    np.testing.assert_array_equal(batch.sampler_logprobs, sampled.rollout.logprobs)
    expected = setup.recipe.advantages(experience)[0]
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)  # jitted and not
    assert experience.values is None and experience.reference_logprobs is None
    assert batch.returns is None and batch.old_values is None


def test_the_reference_scores_as_the_policy_sampled(sampled):
    """Before the first update both are one network: KL terms start at 0."""
    setup = small_setup(small_recipe("ppo", kl_coef=0.1, old_logprobs="recompute"))
    experience, batch, _ = experience_of(setup, state_of(setup), sampled)
    # So does the policy itself, where the trainer computes what the sampler gave.
    np.testing.assert_array_equal(batch.old_logprobs, batch.reference_logprobs)
    mask = sampled.rollout.mask
    # Decoding with a cache against one forward pass, float32.
    np.testing.assert_allclose(
        np.asarray(batch.reference_logprobs)[mask], sampled.rollout.policy_logprobs[mask], atol=1e-5
    )
    np.testing.assert_array_equal(experience.values, 0)


@pytest.fixture
def scoring(monkeypatch, sampled):
    """Stands for the networks' passes over all completions: the policy's log-probabilities as the
    trainer has them, a tenth of a nat and more from the sampler's."""
    there = sampled.rollout.policy_logprobs
    random = np.random.default_rng(9).choice([-0.9, -0.1, 0.1, 0.9], there.shape)
    logprobs = jnp.asarray(there + random.astype(np.float32))
    monkeypatch.setattr(improving, "logprobs_of", lambda *_: (logprobs, logprobs))
    monkeypatch.setattr(improving, "values_of", lambda *_: jnp.zeros_like(logprobs))
    return np.asarray(logprobs)


@pytest.mark.parametrize("name", full_but(RECIPES, "dapo", "vapo"))
def test_every_recipe_can_be_anchored_and_corrected(name, sampled, scoring):
    """With the ratio against what the trainer computes, weights and a mask of its distance."""
    plain = small_setup(small_recipe(name))
    state = state_of(plain)
    expected, untouched, quiet = experience_of(plain, state, sampled)
    assert not plain.recipe.rescores and not [n for n in quiet if n.startswith("rollout_corr/")]
    recipe = small_recipe(
        name,
        old_logprobs="recompute",
        mismatch="truncated",
        mismatch_high=1.5,
        rejection="k2",
        rejection_over="token",
        rejection_high=0.1,
    )
    experience, batch, metrics = experience_of(small_setup(recipe), state, sampled)
    check_known(metrics)
    mask = sampled.rollout.mask
    log_weights = np.where(mask, scoring - sampled.rollout.policy_logprobs, 0)
    kept = mask & (log_weights**2 / 2 <= 0.1)
    assert 0 < kept.sum() < mask.sum()
    np.testing.assert_array_equal(batch.old_logprobs, scoring)
    np.testing.assert_array_equal(experience.old_logprobs, scoring)
    np.testing.assert_array_equal(batch.mask, kept)
    weights = np.where(kept, np.minimum(np.exp(log_weights), 1.5), 0)
    np.testing.assert_allclose(batch.importance_weights, weights, rtol=1e-5)  # float32
    lost = 1 - kept.sum() / mask.sum()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost, rel=1e-5)
    # Credit is given as if nothing had been rejected.
    np.testing.assert_array_equal(experience.mask, mask)
    np.testing.assert_array_equal(experience.rewards, expected.rewards)
    np.testing.assert_array_equal(batch.advantages, untouched.advantages)
    assert untouched.importance_weights is None


def test_the_sampler_stays_the_anchor_where_samples_are_rejected(sampled, scoring):
    recipe = small_recipe(rejection="geometric", rejection_low=0.9, rejection_high=1.2)
    setup = small_setup(recipe)
    _, batch, metrics = experience_of(setup, state_of(setup), sampled)
    np.testing.assert_array_equal(batch.old_logprobs, sampled.rollout.policy_logprobs)
    mask = sampled.rollout.mask
    log_weights = np.where(mask, scoring - sampled.rollout.policy_logprobs, 0)
    means = np.exp(log_weights.sum(axis=1) / mask.sum(axis=1))
    stay = (means >= 0.9) & (means <= 1.2)
    assert 0 < stay.sum() < len(stay)
    np.testing.assert_array_equal(batch.mask, mask & stay[:, None])
    kl = metrics["rollout_corr/kl"]
    assert kl == pytest.approx(-log_weights[mask].mean(), rel=1e-4)


def test_phases_last_as_long_as_their_work(sampled, monkeypatch):
    """Not as long as it takes to ask for it: what is asked for sleeps a quarter of a second."""
    shape = jax.ShapeDtypeStruct(sampled.rollout.mask.shape, jnp.float32)

    def at_work(*_):
        time.sleep(0.25)
        return np.zeros(shape.shape, np.float32)

    @jax.jit
    def slow(zero):
        return jax.pure_callback(at_work, shape, zero)

    monkeypatch.setattr(improving, "logprobs_of", lambda *_: (slow(0.0), slow(0.0)))
    monkeypatch.setattr(improving, "values_of", lambda *_: slow(0.0))
    setup = small_setup(small_recipe("ppo", kl_coef=0.1, old_logprobs="recompute"))
    monkeypatch.setattr(improving, "advantages_of", lambda *_: (slow(0.0), slow(0.0)))
    seconds = experience_of(setup, state_of(setup), sampled)[2]
    assert seconds["timing_s/values"] >= 0.25
    assert seconds["timing_s/ref"] >= 0.5
    assert seconds["timing_s/old_log_prob"] >= 0.5
    assert seconds["timing_s/adv"] >= 0.5


def test_shuffled_rewards(sampled):
    setup = small_setup(run=small_run(shuffle_rewards=True))
    shuffled = [experience_of(setup, state_of(setup, step), sampled) for step in (0, 0, 1)]
    rewards = [np.asarray(experience.rewards) for experience, *_ in shuffled]
    np.testing.assert_array_equal(np.sort(rewards[0]), np.sort(sampled.scores))
    assert not np.array_equal(rewards[0], sampled.scores)
    np.testing.assert_array_equal(rewards[0], rewards[1])
    assert not np.array_equal(rewards[0], rewards[2])
    for reward, (_, batch, _) in zip(rewards, shuffled, strict=True):
        np.testing.assert_array_equal(batch.correct, reward == 1)


def test_summary_pools_means_over_tokens():
    def explained(values, returns):
        return ExplainedVariance.of(jnp.array(values), jnp.array(returns), jnp.ones(len(values)))

    history = [
        {
            "critic": {
                "loss": np.float32(3.0),
                "grad_norm": np.float32(2.0),
                "finite": np.True_,
                "empty": np.False_,
                "critic/vf_explained_var": explained([0.0, 1.0], [1.0, 1.0]),
            }
        },
        {
            "critic": {
                "loss": np.float32(1.0),
                "grad_norm": np.float32(4.0),
                "finite": np.True_,
                "empty": np.False_,
                "critic/vf_explained_var": explained([2.0], [4.0]),
            },
            "actor": {
                "loss": np.float32(8.0),
                "empty": np.False_,
                "actor/pg_loss": np.float32(6.0),
                "actor/entropy": Mean(np.float32(6.0), np.int32(3)),
                "sampling/sampling_logp_difference/mean": Mean(np.float32(2.0), np.int32(4)),
                "sampling/sampling_logp_difference/max": Max(np.float32(0.5)),
                "load": np.array([[1.0, 3.0], [2.0, 2.0]]),
            },
        },
        {
            "actor": {
                "loss": np.float32(2.0),
                "empty": np.False_,
                "actor/pg_loss": np.float32(1.0),
                "actor/entropy": Mean(np.float32(1.0), np.int32(1)),
                "sampling/sampling_logp_difference/mean": Mean(np.float32(90.0), np.int32(4)),
                "sampling/sampling_logp_difference/max": Max(np.float32(90.0)),
                "load": np.array([[3.0, 1.0], [0.0, 4.0]]),
            },
        },
        # No token counts in it, and so it counts in nothing.
        {
            "actor": {
                "loss": np.float32(77.0),
                "empty": np.True_,
                "actor/pg_loss": np.float32(0.0),
                "actor/entropy": Mean(np.float32(0.0), np.int32(0)),
                "sampling/sampling_logp_difference/mean": Mean(np.float32(0.0), np.int32(0)),
                "sampling/sampling_logp_difference/max": Max(np.float32(0.0)),
                "load": np.array([[9.0, 0.0], [9.0, 0.0]]),
            },
        },
    ]
    values, returns = np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 4.0])
    expected = {
        "actor/loss": 5.0,
        "actor/pg_loss": 3.5,
        "actor/entropy": 7 / 4,  # over tokens: the mean of means would be 1.5
        # The first mini-batch alone: after it the policy is no longer the one that sampled.
        "sampling/sampling_logp_difference/mean": 0.5,
        "sampling/sampling_logp_difference/max": 0.5,
        # Over both mini-batches the first layer is even, and the second is 2 to 6.
        "moe/max_load": (1.0 + 1.5) / 2,
        "moe/min_load": (1.0 + 0.5) / 2,
        "critic/loss": 2.0,
        "critic/grad_norm": 3.0,
        "critic/vf_explained_var": 1 - np.var(returns - values) / np.var(returns),
    }
    summary = summarise(history)
    assert summary.keys() == expected.keys()
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-6), name  # float32
    assert summarise([]) == {}
    assert summarise(history[-1:]) == {}


def test_updates_are_counted_by_what_came_of_them():
    def one(finite, empty):
        return {"finite": np.bool_(finite), "empty": np.bool_(empty)}

    history = [
        {"critic": one(True, False)},
        {"critic": one(True, True), "actor": one(True, True)},
        {"critic": one(False, True), "actor": one(False, False)},  # the worse of two reasons
        {"critic": one(True, False), "actor": one(True, False)},
    ]
    assert count_updates(history) == {
        "training/optimizer_steps": 1.0,
        "training/nonfinite_skipped": 2.0,
        "training/empty_skipped": 2.0,
    }
