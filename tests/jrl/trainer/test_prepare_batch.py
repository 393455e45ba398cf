"""From completions to what is learned from: targets, anchors, corrections, and their time."""

import time
from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import fresh_state, fresh_weights, small_recipe, small_run, small_setup
from tiers import full_but

from jrl.recipes import RECIPES, Batch, Targets
from jrl.report.metrics import check_defined
from jrl.rollout.collection.collect import collect
from jrl.rollout.sampler import Completion, scores_of
from jrl.tasks import Verdict
from jrl.trainer import step as preparing
from jrl.trainer.step import prepare


def state_of(setup):
    return fresh_state(setup, fresh_weights(setup))


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(RECIPES, "grpo", "vapo"))
def test_a_reference_is_kept_only_where_it_is_needed(name):
    assert "reference" not in state_of(small_setup(small_recipe(name))).networks
    state = state_of(small_setup(small_recipe(name, kl_coef=0.1)))
    chex.assert_trees_all_equal(state.networks["reference"], state.policy.weights)
    assert (state.critic is None) == (name not in ("ppo", "vapo", "tppo"))


@pytest.mark.slow
def test_a_critic_starts_as_the_policy_that_values_nothing():
    state = state_of(small_setup(small_recipe("ppo")))
    critic, policy = state.critic.weights, state.policy.weights
    np.testing.assert_array_equal(critic.head, 0)
    chex.assert_trees_all_equal(critic.layers, policy.layers)
    assert critic.embedding.unsafe_buffer_pointer() != policy.embedding.unsafe_buffer_pointer()


@dataclass(frozen=True)
class Sampled:
    """The completions of a step."""

    completions: list[Completion]
    batch: Batch[jax.Array]

    @property
    def rollout(self) -> Batch[np.ndarray]:
        return jax.device_get(self.batch)

    @property
    def scores(self) -> np.ndarray:
        return scores_of(self.completions)


@pytest.fixture(scope="module")
def sampled():
    """The completions of one step, with scores that differ between the groups."""
    setup = small_setup()
    sampler = setup.sampler()
    sampler.engine.load(fresh_weights(setup), 0)
    collected = collect(sampler, setup.recipe, setup.mesh, 0)
    scores = [0.0, 0.5, 1.0, 0.5, 0.0, 0.0, 1.0, 1.0]
    reasons = {1.0: "correct", 0.5: "partial", 0.0: "wrong"}
    rows = zip(collected.completions, scores, strict=True)
    judged = [replace(row, verdict=Verdict(score, reasons[score])) for row, score in rows]
    return Sampled(judged, collected.batch)


def prepared(setup, state, sampled):
    return prepare(setup.networks, state, sampled.completions, sampled.scores, sampled.batch)


@pytest.mark.slow
def test_what_is_known_before_the_first_update(sampled):
    setup = small_setup()
    batch, _ = prepared(setup, state_of(setup), sampled)
    np.testing.assert_array_equal(batch.rewards, sampled.scores)
    np.testing.assert_array_equal(batch.lengths, sampled.rollout.mask.sum(axis=1))
    np.testing.assert_array_equal(batch.correct, sampled.scores == 1)
    np.testing.assert_array_equal(batch.old_logprobs, sampled.rollout.old_logprobs)
    np.testing.assert_array_equal(batch.behaviour_logprobs, sampled.rollout.behaviour_logprobs)
    expected = setup.recipe.targets(batch).advantages
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)  # jitted and not
    assert batch.old_values is None and batch.reference_logprobs is None
    assert batch.returns is None and batch.critic_mask is None


@pytest.mark.slow
def test_nothing_is_known_of_responses_that_go_on(sampled):
    setup = small_setup(small_recipe("tppo"))
    finished = np.arange(8) % 4 != 2
    given = replace(sampled, batch=sampled.batch.replace(finished=jnp.asarray(finished)))
    batch, _ = prepared(setup, state_of(setup), given)
    expected = np.where(finished, 2 * sampled.scores - 1, 0)
    np.testing.assert_array_equal(batch.rewards, expected)
    np.testing.assert_array_equal(batch.correct, finished & (sampled.scores == 1))
    assert (~finished & (sampled.scores == 1)).any()
    np.testing.assert_array_equal(
        np.asarray(batch.critic_mask).any(axis=1), finished & sampled.rollout.mask.any(axis=1)
    )


@pytest.mark.slow
def test_the_reference_scores_as_the_policy_sampled(sampled):
    """Before the first update both are one network: KL terms start at 0."""
    setup = small_setup(small_recipe("ppo", kl_coef=0.1, old_logprobs="recompute"))
    batch, _ = prepared(setup, state_of(setup), sampled)
    # So does the policy itself, where the trainer computes what the sampler gave.
    np.testing.assert_array_equal(batch.old_logprobs, batch.reference_logprobs)
    mask = sampled.rollout.mask
    # Decoding with a cache against one forward pass, float32.
    np.testing.assert_allclose(
        np.asarray(batch.reference_logprobs)[mask], sampled.rollout.old_logprobs[mask], atol=1e-5
    )
    np.testing.assert_array_equal(batch.old_values, 0)


@pytest.fixture
def scoring(monkeypatch, sampled):
    """Stands for the networks' passes over all completions: the policy's log-probabilities as the
    trainer has them, a tenth of a nat and more from the sampler's."""
    there = sampled.rollout.old_logprobs
    random = np.random.default_rng(9).choice([-0.9, -0.1, 0.1, 0.9], there.shape)
    logprobs = jnp.asarray(there + random.astype(np.float32))
    monkeypatch.setattr(preparing, "logprobs_of", lambda *_: (logprobs, logprobs))
    entropy = jnp.asarray(np.random.default_rng(10).uniform(0, 1, there.shape), jnp.float32)
    monkeypatch.setattr(preparing, "logprobs_and_entropy_of", lambda *_: (logprobs, entropy))
    monkeypatch.setattr(preparing, "values_of", lambda *_: jnp.zeros_like(logprobs))
    return np.asarray(logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(RECIPES, "dapo", "vapo"))
def test_every_recipe_can_be_anchored_and_corrected(name, sampled, scoring):
    """With the ratio against what the trainer computes, weights and a mask of its distance."""
    # As rows stand: `scoring` stands for the pass that scores them so.
    unpacked = small_run(packing=False)
    plain = small_setup(small_recipe(name), unpacked)
    state = state_of(plain)
    untouched, quiet = prepared(plain, state, sampled)
    # HAPO scores the completions for their entropies, and weighs them.
    rescores = plain.recipe.temperature_rule is not None
    assert plain.recipe.rescores == rescores
    assert any(name.startswith("rollout_corr/") for name in quiet) == rescores
    assert (untouched.old_entropy is not None) == rescores
    recipe = small_recipe(
        name,
        old_logprobs="recompute",
        mismatch="truncated",
        mismatch_high=1.5,
        rejection="k2",
        rejection_over="token",
        rejection_high=0.1,
    )
    batch, metrics = prepared(small_setup(recipe, unpacked), state, sampled)
    check_defined(metrics)
    mask = sampled.rollout.mask
    log_weights = np.where(mask, scoring - sampled.rollout.old_logprobs, 0)
    kept = mask & (log_weights**2 / 2 <= 0.1)
    assert 0 < kept.sum() < mask.sum()
    np.testing.assert_array_equal(batch.old_logprobs, scoring)
    np.testing.assert_array_equal(batch.mask, kept)
    weights = np.where(kept, np.minimum(np.exp(log_weights), 1.5), 0)
    np.testing.assert_allclose(batch.importance_weights, weights, rtol=1e-5)  # float32
    lost = 1 - kept.sum() / mask.sum()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost, rel=1e-5)
    # Credit is given as if nothing had been rejected.
    np.testing.assert_array_equal(batch.rewards, untouched.rewards)
    np.testing.assert_array_equal(batch.advantages, untouched.advantages)
    assert (untouched.importance_weights is not None) == rescores


@pytest.mark.slow
def test_r2_records_in_the_pass_before_the_first_update(sampled, scoring, monkeypatch):
    """The reference, whose routers are its own, replays nothing."""
    setup = small_setup(small_recipe(router_replay="R2", kl_coef=0.1))
    state, asked = state_of(setup), []
    shape = (*sampled.rollout.tokens.shape, setup.model.num_layers, 2)
    record = jnp.ones(shape, jnp.uint8)

    def recording(objective, weights, tokens, valid):
        assert weights is state.policy.weights
        return jnp.asarray(scoring), record

    def scored(objective, weights, tokens, valid, choices=None):
        asked.append((weights is state.networks.get("reference"), choices))
        return jnp.asarray(scoring), jnp.asarray(scoring)

    monkeypatch.setattr(preparing, "logprobs_and_choices_of", recording)
    monkeypatch.setattr(preparing, "logprobs_of", scored)
    batch, metrics = prepared(setup, state, sampled)
    assert asked == [(True, None)]
    assert batch.choices is record
    # Without more being asked for, ratios stay those against the sampler.
    np.testing.assert_array_equal(batch.old_logprobs, sampled.rollout.old_logprobs)
    np.testing.assert_array_equal(batch.mask, sampled.rollout.mask)
    assert batch.importance_weights is None and "timing_s/old_log_prob" in metrics


@pytest.mark.slow
def test_r3_replays_what_the_sampler_chose(sampled, scoring, monkeypatch):
    recipe = small_recipe(router_replay="R3", old_logprobs="recompute", kl_coef=0.1)
    setup = small_setup(recipe)
    state, asked = state_of(setup), []
    record = jnp.ones((*sampled.rollout.tokens.shape, setup.model.num_layers, 2), jnp.uint8)

    def scored(objective, weights, tokens, valid, choices=None):
        asked.append((weights is state.networks.get("reference"), choices))
        return jnp.asarray(scoring), jnp.asarray(scoring)

    monkeypatch.setattr(preparing, "logprobs_of", scored)
    given = replace(sampled, batch=sampled.batch.replace(choices=record))
    batch, _ = prepared(setup, state, given)
    assert [(reference, choices is None) for reference, choices in asked] == [
        (True, True),
        (False, False),
    ]
    assert batch.choices is asked[1][1] is record
    with pytest.raises(ValueError, match=r"'R3' replays.* the rollout gave none: .* or choose R2"):
        prepared(setup, state, sampled)
    short = replace(sampled, batch=sampled.batch.replace(choices=record[..., :1]))
    with pytest.raises(ValueError, match=r"\[8, 11, 1, 2\] numbers .* gave \[8, 11, 1, 1\]"):
        prepared(setup, state, short)


@pytest.mark.slow
def test_masks_of_targets_and_rejection(sampled, scoring, monkeypatch):
    """What is rejected counts for neither network; the critic keeps what is not the policy's."""
    recipe = small_recipe("ppo", rejection="k2", rejection_over="token", rejection_high=0.1)
    setup = small_setup(recipe)
    made, mask = preparing.targets_of, sampled.rollout.mask
    own = mask & (np.arange(mask.shape[1]) % 2 == 0)

    def masked(recipe, batch):
        return made(recipe, batch).replace(mask=jnp.asarray(own), critic_mask=jnp.asarray(mask))

    monkeypatch.setattr(preparing, "targets_of", masked)
    batch, _ = prepared(setup, state_of(setup), sampled)
    near = (scoring - sampled.rollout.old_logprobs) ** 2 / 2 <= 0.1
    assert (own & ~near).any() and (mask & ~own).any()
    np.testing.assert_array_equal(batch.mask, own & near)
    np.testing.assert_array_equal(batch.critic_mask, mask & (near | ~own))


@pytest.mark.slow
@pytest.mark.parametrize("name", full_but(["grpo", "ppo", "tppo"], "grpo", "ppo"))
def test_truncated_responses_are_filtered(name, sampled):
    """From the policy's loss alone: baselines and the critic have them."""
    truncated = np.arange(8) % 3 == 0
    given = replace(sampled, batch=sampled.batch.replace(truncated=jnp.asarray(truncated)))
    plain, filtered = (small_setup(small_recipe(name, overlong_filter=on)) for on in (False, True))
    expected, _ = prepared(plain, state_of(plain), given)
    batch, _ = prepared(filtered, state_of(filtered), given)
    assert np.asarray(expected.mask)[truncated].any()
    np.testing.assert_array_equal(batch.mask, np.asarray(expected.mask) & ~truncated[:, None])
    np.testing.assert_array_equal(batch.advantages, expected.advantages)
    if name == "grpo":
        assert batch.critic_mask is None
    else:
        learned = expected.mask if expected.critic_mask is None else expected.critic_mask
        np.testing.assert_array_equal(batch.critic_mask, learned)
        np.testing.assert_array_equal(batch.returns, expected.returns)


@pytest.mark.slow
def test_the_sampler_stays_the_anchor_where_samples_are_rejected(sampled, scoring):
    recipe = small_recipe(rejection="geometric", rejection_low=0.9, rejection_high=1.2)
    setup = small_setup(recipe)
    batch, metrics = prepared(setup, state_of(setup), sampled)
    np.testing.assert_array_equal(batch.old_logprobs, sampled.rollout.old_logprobs)
    mask = sampled.rollout.mask
    log_weights = np.where(mask, scoring - sampled.rollout.old_logprobs, 0)
    means = np.exp(log_weights.sum(axis=1) / mask.sum(axis=1))
    stay = (means >= 0.9) & (means <= 1.2)
    assert 0 < stay.sum() < len(stay)
    np.testing.assert_array_equal(batch.mask, mask & stay[:, None])
    kl = metrics["rollout_corr/kl"]
    assert kl == pytest.approx(-log_weights[mask].mean(), rel=1e-4)


@pytest.mark.slow
def test_phases_last_as_long_as_their_work(sampled, monkeypatch):
    """Not as long as it takes to ask for it: what is asked for sleeps a quarter of a second."""
    shape = jax.ShapeDtypeStruct(sampled.rollout.mask.shape, jnp.float32)

    def at_work(*_):
        time.sleep(0.25)
        return np.zeros(shape.shape, np.float32)

    @jax.jit
    def slow(zero):
        return jax.pure_callback(at_work, shape, zero)

    monkeypatch.setattr(preparing, "logprobs_of", lambda *_: (slow(0.0), slow(0.0)))
    monkeypatch.setattr(preparing, "values_of", lambda *_: slow(0.0))
    setup = small_setup(small_recipe("ppo", kl_coef=0.1, old_logprobs="recompute"))
    monkeypatch.setattr(preparing, "targets_of", lambda *_: Targets(slow(0.0), slow(0.0)))
    seconds = prepared(setup, state_of(setup), sampled)[1]
    assert seconds["timing_s/values"] >= 0.25
    assert seconds["timing_s/ref"] >= 0.5
    assert seconds["timing_s/old_log_prob"] >= 0.5
    assert seconds["timing_s/adv"] >= 0.5
