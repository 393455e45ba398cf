"""What HAPO keeps from step to step: by whom it is read, and that it comes back."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import (
    fresh_state,
    fresh_weights,
    one_step,
    small_batch,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.losses import EntropyStatistics, entropy_statistics
from jrl.report.metrics import check_defined, without_timings
from jrl.runs.checkpoints import Checkpoints
from jrl.trainer import step as stepping
from jrl.trainer.scoring import logprobs_and_entropy_of
from jrl.trainer.state import restore, save
from jrl.trainer.step import sampling_difference

QUANTILE = 0.8
statistics_of = jax.jit(partial(entropy_statistics, quantile=QUANTILE))


def recipe_of(**changes):
    """Temperatures far enough from the base to be seen."""
    return small_recipe("hapo", tau=0.8, max_generation_rounds=2, **changes)


@pytest.mark.slow
def test_a_step_is_sampled_by_the_entropies_of_the_step_before(tmp_path, monkeypatch):
    setup = small_setup(recipe_of(), small_run(layout="tp2 dp2 / ep4"))
    first = fresh_state(setup, fresh_weights(setup))
    chex.assert_trees_all_equal(first.algorithm["entropy_statistics"], EntropyStatistics.neutral())
    prepare, batches, before = stepping.prepare, [], []

    def recorded(networks, state, completions, scores, batch, *rest):
        rows = batch.tokens, batch.valid
        objective, weights = networks.policy.objective, state.policy.weights
        before.append(jax.device_get((*logprobs_and_entropy_of(objective, weights, *rows), batch)))
        prepared = prepare(networks, state, completions, scores, batch, *rest)
        batches.append(jax.device_get(prepared[0]))
        return prepared

    histories, summarise = [], stepping.summarise
    monkeypatch.setattr(stepping, "summarise", lambda h: (histories.append(h), summarise(h))[1])
    monkeypatch.setattr(stepping, "prepare", recorded)
    second, done = one_step(setup, first)
    check_defined(done.metrics)
    _, entropy, batch = before[0]
    expected = statistics_of(entropy, batch.mask)
    assert setup.recipe.entropy_quantile == QUANTILE
    # Sums over devices in another order.
    chex.assert_trees_all_close(second.algorithm["entropy_statistics"], expected, rtol=1e-5)
    # There was nothing to follow yet: drawn from the policy itself, and not corrected.
    np.testing.assert_array_equal(batch.behaviour_logprobs, batch.old_logprobs)
    np.testing.assert_array_equal(batches[0].importance_weights, batch.mask.astype(np.float32))
    assert done.metrics["sampling/temperature/min"] == done.metrics["sampling/temperature/max"] == 1

    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, setup.networks, second)
    again = restore(checkpoints, setup.networks, 1)
    chex.assert_trees_all_equal(
        again.algorithm["entropy_statistics"], second.algorithm["entropy_statistics"]
    )

    # The second step, of which the first token of a row is drawn by its entropy.
    third, done = one_step(setup, second)
    logprobs, entropy, batch = before[1]
    kept, mask = again.algorithm["entropy_statistics"], batch.mask
    assert mask.any()
    rule = setup.recipe.temperature_rule
    temperature = np.asarray(
        jax.jit(lambda *given: rule.token_temperatures(*given, 1.0))(entropy, mask, kept)
    )
    assert np.ptp(temperature[mask]) > 0.1
    assert done.metrics["sampling/temperature/max"] == pytest.approx(temperature[mask].max())
    assert done.metrics["sampling/temperature/min"] == pytest.approx(temperature[mask].min())
    np.testing.assert_allclose(batch.old_logprobs[mask], logprobs[mask], atol=1e-5)
    moved = batch.behaviour_logprobs[mask] - batch.old_logprobs[mask]
    assert np.abs(moved).max() > 0.01
    # What the temperature made likelier counts for less, and the other way round.
    weights = np.where(mask, np.exp(batch.old_logprobs - batch.behaviour_logprobs), 0)
    np.testing.assert_allclose(batches[1].importance_weights, np.minimum(weights, 2), rtol=1e-5)
    # Like is compared with like, at every temperature.
    assert 0 <= done.metrics["sampling/sampling_logp_difference/max"] < 1e-5
    assert abs(done.metrics["rollout_corr/kl"]) < 1e-5
    # An update, which knows no temperature of a token, has nothing to compare.
    assert not any(name.startswith("sampling/") for name in histories[1][0]["actor"])
    assert sampling_difference(setup.networks, second, batch) == {}

    monkeypatch.undo()
    resumed, done_again = one_step(setup, again)
    assert without_timings(done_again.metrics) == without_timings(done.metrics)
    chex.assert_trees_all_equal(resumed, third)


def test_other_recipes_keep_nothing():
    setup = small_setup(small_recipe("dapo"))
    assert fresh_state(setup, fresh_weights(setup)).algorithm == {}


def test_a_step_without_a_token_that_counts_leaves_what_was_kept():
    setup = small_setup(recipe_of())
    batch = small_batch(setup)
    batch = batch.replace(old_entropy=-batch.old_logprobs)
    before = EntropyStatistics(*(jnp.float32(x) for x in (-1.5, 2.0, 1.0, -3.0)))

    update = jax.jit(setup.recipe.update_state)

    def kept(sampled):
        state, _ = update({"entropy_statistics": before}, batch.replace(mask=sampled))
        return state["entropy_statistics"]

    chex.assert_trees_all_equal(kept(jnp.zeros_like(batch.mask)), before)
    expected = statistics_of(batch.old_entropy, batch.mask)
    chex.assert_trees_all_equal(kept(batch.mask), expected)


@pytest.mark.slow
def test_statistics_of_the_loss_are_those_of_the_mini_batch():
    """In micro-batches of four rows and of two the step is the same, up to the order of sums."""
    found = []
    for micro_batch in (4, 2):
        setup = small_setup(recipe_of(micro_batch=micro_batch))
        _, done = one_step(setup, fresh_state(setup, fresh_weights(setup)))
        found.append((done.metrics["actor/loss"], done.metrics["actor/grad_norm"]))
    # The loss is a mean of terms of about 1 and of both signs that nearly cancel.
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
