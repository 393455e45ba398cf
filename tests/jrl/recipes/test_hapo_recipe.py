"""HAPO: with its switches off it is DAPO, with them on each does what its vectors say."""

import functools
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from jrl import entropy_signal, hapo_loss
from jrl.losses import EntropyStatistics, entropy_statistics
from jrl.recipes import AdaptiveTemperature, Batch, Dapo, Hapo
from jrl.recipes.base.mismatch import Correction
from jrl.trainer.learner.update import count, policy_loss

OFF = {
    "adaptive_temperature": False,
    "token_level_group_average": False,
    "differential_redistribution": False,
    "asymmetric_clipping": False,
}
LENGTHS = [4, 2, 6, 8, 3, 3, 6, 4]
ROWS, TIME = len(LENGTHS), 10
MASK = np.arange(TIME)[None, :] < np.array(LENGTHS)[:, None]


@functools.partial(jax.jit, static_argnums=0)
def targets_of(recipe, given):
    return recipe.targets(given)


@functools.cache
def batch(recipe):
    random = np.random.default_rng(6)
    old = np.where(MASK, random.uniform(-2, 0, MASK.shape), np.nan).astype(np.float32)
    given = Batch(
        tokens=np.zeros(MASK.shape, np.int32),
        valid=MASK,
        mask=MASK,
        old_logprobs=old,
        behaviour_logprobs=old,
        rewards=np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], np.float32),
        correct=np.array([True, False, False, True, True, False, False, False]),
        groups=np.array([3] * 4 + [1] * 4, np.int32),
        lengths=np.array(LENGTHS, np.int32),
    )
    return replace(given, advantages=np.asarray(targets_of(recipe, given).advantages))


def current(given):
    """Log-probabilities near and far from the old ones, and entropies."""
    random = np.random.default_rng(7)
    moved = random.uniform(-0.6, 0.6, MASK.shape).astype(np.float32)
    entropy = random.uniform(0.01, 2.0, MASK.shape).astype(np.float32)
    return np.where(MASK, given.old_logprobs + moved, np.float32(np.nan)), entropy


@functools.partial(jax.jit, static_argnums=0)
def loss_and_slope(recipe, given, logprobs, entropy):
    statistics = recipe.statistics(logprobs, entropy, given) if recipe.uses_statistics else None
    step = jax.value_and_grad(
        lambda x: policy_loss(recipe, x, entropy, given, count(given, statistics), TIME),
        has_aux=True,
    )
    return step(logprobs)


def loss_of(recipe, given):
    return loss_and_slope(recipe, given, *current(given))


@functools.partial(jax.jit, static_argnums=0)
def surrogate_of(recipe, logprobs, entropy, given):
    """The losses of the tokens and their metrics, with the statistics of the batch."""
    statistics = recipe.statistics(logprobs, entropy, given) if recipe.uses_statistics else None
    return recipe.surrogate(logprobs, entropy, given, statistics)


signal_of = jax.jit(entropy_signal)


@pytest.mark.slow
def test_without_its_components_it_is_dapo():
    hapo, dapo = Hapo(**OFF), Dapo()
    assert hapo.collection == dapo.collection and hapo.temperature_rule is None
    assert not hapo.uses_statistics and not hapo.rescores
    ours, theirs = batch(hapo), batch(dapo)
    np.testing.assert_array_equal(ours.advantages, theirs.advantages)
    np.testing.assert_array_equal(
        *(
            jax.jit(recipe.rewards, static_argnums=2)(ours.rewards, ours.lengths, TIME)
            for recipe in (hapo, dapo)
        )
    )
    # Weights of the policy over the same policy, as the sampler gave it: one exactly.
    found = jax.jit(hapo.correction.correct)(
        None,
        ours.old_logprobs,
        ours.mask,
        old_logprobs=ours.old_logprobs,
        behaviour_logprobs=ours.behaviour_logprobs,
    )
    np.testing.assert_array_equal(found.importance_weights, MASK.astype(np.float32))
    weighted = replace(ours, importance_weights=found.importance_weights)
    for given in (ours, weighted):
        (loss, _), slope = loss_of(hapo, given)
        (expected, _), expected_slope = loss_of(dapo, theirs)
        assert float(loss) == float(expected)
        np.testing.assert_array_equal(slope, expected_slope)


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["differential_redistribution", "asymmetric_clipping"])
def test_each_component_of_the_loss_has_its_switch(switch):
    recipe = Hapo(**{**OFF, switch: True})
    given = batch(recipe)
    np.testing.assert_array_equal(given.advantages, batch(Dapo()).advantages)
    logprobs, entropy = current(given)
    strengths = {
        "redistribution": float(switch == "differential_redistribution"),
        "clip_strength": float(switch == "asymmetric_clipping"),
    }

    @jax.jit
    def hapo(logprobs, entropy, given):
        arrays = (logprobs, given.old_logprobs, given.advantages, given.mask)
        signal = entropy_signal(entropy, given.mask)
        return hapo_loss(*arrays, signal, **strengths, clip_dual=None, aggregation=None)[0]

    expected = hapo(logprobs, entropy, given)
    found, metrics = surrogate_of(recipe, logprobs, entropy, given)
    np.testing.assert_array_equal(found, expected)
    plain, _ = surrogate_of(Dapo(), logprobs, entropy, given)
    assert not np.array_equal(found, plain)
    changed = float(metrics["redistributed"].value())
    assert (changed > 0) == (switch == "differential_redistribution")


@pytest.mark.slow
def test_token_level_group_average_has_its_switch():
    """The example of the reference: rewards 1 and 0, tokens of a group sum to 0."""
    recipe = Hapo(**{**OFF, "token_level_group_average": True})
    expected = [0.816495, -1.224742, -1.224742, 0.816495, 2.081661, *[-0.480383] * 3]
    advantages = np.asarray(batch(recipe).advantages)
    np.testing.assert_allclose(
        advantages, np.where(MASK, np.array(expected)[:, None], 0.0), atol=2e-6
    )
    for rows in (slice(0, 4), slice(4, 8)):
        np.testing.assert_allclose(advantages[rows].sum(), 0, atol=1e-5)
    fallen = batch(replace(recipe, group_average_fallback=2.0)).advantages
    np.testing.assert_array_equal(fallen[:4], advantages[:4])
    np.testing.assert_array_equal(fallen[4:], batch(Dapo()).advantages[4:])


def test_the_temperature_has_its_switch():
    rule = Hapo(**{**OFF, "adaptive_temperature": True, "tau": 0.2}).temperature_rule
    assert rule == AdaptiveTemperature(tau=0.2)
    assert Hapo(temperature=0.0).temperature_rule is None  # greedy
    assert Hapo().rescores and not Hapo(adaptive_temperature=False).rescores


@pytest.mark.slow
def test_decided_tokens_are_damped():
    """The released code loses the sign of their signal, so that nothing is."""
    recipe = replace(Hapo(), asymmetric_clipping=False)
    given = batch(recipe)
    entropy = np.where(MASK, np.linspace(0.01, 2.0, TIME), 0.0).astype(np.float32)
    # At a ratio of 1 every token lies inside the zone.
    found, _ = surrogate_of(recipe, given.old_logprobs, entropy, given)
    signal = np.asarray(signal_of(entropy, given.mask))
    wanted = np.where(signal > 0, 1.0, 1 + signal) * given.advantages
    np.testing.assert_allclose(found, -wanted, rtol=1e-5, atol=1e-6)
    assert np.any(signal[MASK] < -0.5)


def test_what_is_kept_is_of_all_sampled_tokens():
    recipe = Hapo(entropy_quantile=0.5)
    entropy = np.random.default_rng(8).uniform(0.01, 2, MASK.shape).astype(np.float32)
    given = replace(batch(recipe), old_entropy=np.where(MASK, entropy, np.float32(np.nan)))
    state = recipe.init_state(9)
    statistics = jax.jit(lambda given: recipe.update_state(state, given)[0]["entropy_statistics"])
    found = statistics(given)
    expected = jax.jit(lambda x: entropy_statistics(x, MASK, quantile=0.5))(entropy)
    chex.assert_trees_all_equal(found, expected)
    assert Dapo().init_state(9) == {}
    nothing = statistics(replace(given, mask=np.zeros_like(given.mask)))
    chex.assert_trees_all_equal(nothing, EntropyStatistics.neutral())


@pytest.mark.parametrize("anchor", ["sampler", "recompute"])
def test_ratio_and_weight_together_are_of_the_distribution_drawn_from(anchor):
    random = np.random.default_rng(9)
    drawn, sampler, trainer, logprobs = (
        random.uniform(-1.5, -1, MASK.shape).astype(np.float32) for _ in range(4)
    )
    recipe = Hapo(old_logprobs=anchor)
    old = sampler if anchor == "sampler" else trainer
    found = jax.jit(recipe.correction.correct)(
        trainer, sampler, MASK, old_logprobs=old, behaviour_logprobs=drawn
    )
    product = np.exp(logprobs - old) * found.importance_weights
    np.testing.assert_allclose(
        product, np.where(MASK, np.exp(logprobs - drawn), 0), rtol=1e-5, atol=1e-7
    )
    # How far the sampler is from the trainer is asked of the policy on both sides.
    kl = np.asarray(sampler - trainer)[MASK].mean()
    np.testing.assert_allclose(found.metrics["rollout_corr/kl"], kl, rtol=1e-4, atol=1e-6)
    compare = Correction("truncated", mismatch_denominator="policy").correct
    compared = jax.jit(compare)(trainer, sampler, MASK)
    np.testing.assert_allclose(
        compared.importance_weights, np.where(MASK, np.exp(trainer - sampler), 0), rtol=1e-5
    )


def test_weights_are_chosen():
    assert Hapo().correction == Correction("truncated", mismatch_denominator="drawn")
    assert Hapo(adaptive_temperature=False).correction.mismatch_denominator == "drawn"
    assert not Hapo(mismatch=None).correction.on
    compared = Hapo(mismatch_denominator="policy", old_logprobs="recompute").correction
    assert compared.mismatch_denominator == "policy" and compared.needs_recomputed_logprobs
    assert Dapo(mismatch="icepop", mismatch_denominator="drawn").correction.on
    assert not Dapo(mismatch="icepop", mismatch_denominator="drawn").rescores
    with pytest.raises(ValueError, match="mismatch_denominator=drawn has no effect: mismatch=None"):
        Dapo(mismatch_denominator="drawn")
    with pytest.raises(
        ValueError, match=r"divide by the sampling distribution \(mismatch_denominator="
    ):
        Hapo(mismatch_denominator="policy")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 1.5}, "tau=1.5 must be from 0"),
        ({"entropy_quantile": -0.1, "adaptive_temperature": False}, "entropy_quantile=-0.1 must"),
        ({"redistribution_strength": 1.5}, "redistribution_strength=1.5 must be from 0"),
        ({"clip_strength": -1.0}, "clip_strength=-1.0 cannot be negative"),
        ({"group_average_fallback": 0.0}, "group_average_fallback=0.0 must be positive"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        Hapo(**settings)
