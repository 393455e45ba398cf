"""What a recipe does about a sampler that is not quite the trainer: weights, masks, refusals."""

import re
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from tiers import full_but

from jrl.losses import aggregate
from jrl.recipes import RECIPES, Batch, Grpo
from jrl.recipes.base.mismatch import Correction
from jrl.report.metrics import check_defined
from jrl.trainer.learner.update import count, policy_loss

# Three tokens and four; what lies under the mask is far off.
LOG_W = np.array([[0.1, -0.2, 1.2, 0.0], [-0.5, -0.9, 0.3, 9.0]], np.float32)
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0]], bool)
W = np.where(MASK, np.exp(LOG_W), 0.0)
SAMPLER = np.linspace(-3, -1, 8, dtype=np.float32).reshape(2, 4)
FLOAT32 = {"rtol": 2e-5, "atol": 1e-6}


def correct(correction):
    """The mask, the weights and the metrics without their common name."""
    found = jax.jit(correction.correct)(SAMPLER + LOG_W, SAMPLER, MASK)
    check_defined(found.metrics)
    short = {name.removeprefix("rollout_corr/"): value for name, value in found.metrics.items()}
    return found.mask, found.importance_weights, short


def test_statistics_alone():
    mask, weights, metrics = correct(Correction())
    np.testing.assert_array_equal(mask, MASK)
    assert weights is None
    expected = {
        "kl": -LOG_W[MASK].mean(),
        "k3_kl": (W - 1 - LOG_W)[MASK].mean(),
        "log_ppl_diff": np.mean([-1.1 / 4, 1.1 / 3]),
        "log_ppl_abs_diff": np.mean([1.1 / 4, 1.1 / 3]),
        "chi2_token": (W[MASK] ** 2).mean() - 1,
        "chi2_seq": np.mean([np.exp(2.2), np.exp(-2.2)]) - 1,
    }
    chex.assert_trees_all_close(metrics, expected, **FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("correction", "expected", "high", "low"),
    [
        (Correction("truncated"), np.minimum(W, 2), 1, 0),
        (Correction("truncated", mismatch_low=0.5), np.where(MASK, np.clip(W, 0.5, 2), 0), 1, 1),
        (Correction("truncated", mismatch_high=1.2), np.minimum(W, 1.2), 2, 0),
        (Correction("truncated", "sequence"), [[2.0] * 4, [np.exp(-1.1)] * 3 + [0.0]], 4, 0),
        (Correction("icepop"), np.where(np.float32(0.5) <= W, W, 0), 0, 1),
        (Correction("icepop", mismatch_high=2.0), np.where((W >= 0.5) & (W <= 2), W, 0), 1, 1),
        (
            Correction("icepop", "geometric", mismatch_low=1.0),
            [[np.exp(1.1 / 4)] * 4, [0.0] * 4],
            0,
            3,
        ),
        (Correction("sequence-masked"), W, 0, 0),
        (Correction("sequence-masked", mismatch_high=1.2), W * [[0], [1]], 4, 0),
    ],
)
def test_weights(correction, expected, high, low):
    """`high` and `low` count the tokens whose weight was out of bounds."""
    mask, weights, metrics = correct(correction)
    np.testing.assert_array_equal(mask, MASK)
    np.testing.assert_allclose(weights, expected, **FLOAT32)
    counted = np.asarray(expected)[MASK]
    of_weights = {
        "rollout_is_mean": counted.mean(),
        "rollout_is_min": counted.min(),
        "rollout_is_max": counted.max(),
        "rollout_is_eff_sample_size": counted.sum() ** 2 / (counted**2).sum() / 7,
        "rollout_is_ratio_fraction_high": high / 7,
        "rollout_is_ratio_fraction_low": low / 7,
    }
    found = {name: value for name, value in metrics.items() if "_is_" in name}
    chex.assert_trees_all_close(found, of_weights, **FLOAT32)
    assert not [name for name in metrics if "_rs_" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("correction", "kept"),
    [
        (Correction(rejection="geometric", rejection_low=0.6, rejection_high=1.2), [[0], [1]]),
        (Correction(rejection="geometric", rejection_low=0.7, rejection_high=1.4), [[1], [0]]),
        (Correction(rejection="geometric"), [[0], [0]]),
        (Correction(rejection="k3", rejection_high=0.2), [[0], [1]]),
        (Correction(rejection="k2", rejection_high=0.19), [[1], [0]]),
        (Correction(rejection="k3"), [[0], [0]]),
        (
            Correction(rejection="k2", rejection_over="token", rejection_high=0.1),
            LOG_W**2 / 2 <= 0.1,
        ),
    ],
)
def test_rejection(correction, kept):
    expected = MASK & np.asarray(kept, bool)
    mask, weights, metrics = correct(correction)
    np.testing.assert_array_equal(mask, expected)
    assert weights is None
    gone = MASK & ~expected
    np.testing.assert_allclose(metrics["rollout_rs_masked_fraction"], gone.sum() / 7, rtol=1e-6)
    np.testing.assert_array_equal(
        metrics["rollout_rs_seq_masked_fraction"], gone.any(axis=1).mean()
    )
    # Statistics cover everything that was sampled.
    np.testing.assert_allclose(metrics["kl"], -LOG_W[MASK].mean(), **FLOAT32)


@pytest.mark.parametrize("over", ["token", "sequence"])
def test_weights_of_what_is_left_average_to_one(over):
    reject = {"rejection": "k2", "rejection_over": "token", "rejection_high": 0.2}
    correction = Correction("truncated", mismatch_mean=over, **reject)
    mask, weights, metrics = correct(correction)
    mask = np.asarray(mask)
    left = np.minimum(W, 2) * mask
    means = left.sum(axis=1) / mask.sum(axis=1)
    mean = left.sum() / mask.sum() if over == "token" else means.mean()
    np.testing.assert_allclose(weights, left / mean, **FLOAT32)
    np.testing.assert_allclose(metrics["rollout_is_max"], (left / mean).max(), **FLOAT32)


def test_nothing_left_is_nothing():
    correction = Correction("icepop", mismatch_mean="token", rejection="geometric")
    _, weights, metrics = correct(correction)
    np.testing.assert_array_equal(weights, 0)
    chex.assert_tree_all_finite(metrics)
    assert metrics["rollout_is_min"] == metrics["rollout_is_max"] == 0


@pytest.mark.parametrize("name", full_but(RECIPES, "grpo", "vapo", "hapo"))
def test_every_recipe_weighs_its_policy_loss(name):
    recipe = RECIPES[name](entropy_coef=0.1, kl_coef=0.2)
    random = np.random.default_rng(3)
    arrays = [random.uniform(-1, 1, (2, 4)).astype(np.float32) for _ in range(4)]
    old_logprobs, advantages, reference, weights = (
        arrays[0] - 2,
        arrays[1],
        arrays[2] - 2,
        arrays[3],
    )
    logprobs, weights = old_logprobs + 0.3 * arrays[3], weights**2
    batch = Batch(
        tokens=np.zeros((2, 4), np.int32),
        valid=MASK,
        mask=MASK,
        old_logprobs=old_logprobs,
        behaviour_logprobs=old_logprobs,
        advantages=advantages,
        correct=np.array([True, False]),
        logprobs={"reference": reference},
    )
    entropy = np.ones((2, 4), np.float32)

    @jax.jit
    def losses(logprobs, entropy, batch):
        statistics = None
        if recipe.uses_statistics:
            statistics = recipe.statistics(logprobs, entropy, batch)
        arrays, totals = (logprobs, entropy, batch), count(batch, statistics)
        given = replace(batch, importance_weights=weights)
        surrogate, _ = recipe.surrogate(logprobs, entropy, given, statistics)
        return (
            policy_loss(recipe, *arrays, totals, 4),
            policy_loss(recipe, logprobs, entropy, given, totals, 4),
            aggregate(weights * surrogate, MASK, recipe.aggregation, max_length=4),
        )

    (plain, expected), (weighted, found), wanted = losses(logprobs, entropy, batch)
    np.testing.assert_allclose(found["actor/pg_loss"], wanted, **FLOAT32)
    # The terms beside it have no ratio, and so no weight.
    np.testing.assert_allclose(
        weighted - plain, found["actor/pg_loss"] - expected["actor/pg_loss"], **FLOAT32
    )


RECOMPUTE = {"old_logprobs": "recompute"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mismatch": "icepop"}, "mismatch='icepop' needs old_logprobs='recompute': a ratio"),
        ({"mismatch_high": 3.0}, "mismatch_high=3.0 has no effect: mismatch=None. Leave it out"),
        ({"mismatch_level": "sequence"}, "mismatch_level=sequence has no effect: mismatch=None"),
        ({"mismatch_mean": "token", **RECOMPUTE}, "mismatch_mean=token has no effect"),
        ({"rejection_high": 3.0}, "rejection_high=3.0 has no effect: rejection=None"),
        ({"rejection_over": "sum"}, "rejection_over=sum has no effect: rejection=None"),
        (
            {"rejection": "k3", "rejection_low": 0.5},
            "rejection_low=0.5 has no effect: rejection='k3' bounds a divergence from above",
        ),
        (
            {"rejection": "geometric", "rejection_over": "max"},
            "rejection_over='max' is not supported with rejection='geometric'",
        ),
        (
            {"mismatch": "sequence-masked", "mismatch_level": "geometric", **RECOMPUTE},
            "mismatch_level='geometric' is not supported with mismatch='sequence-masked'",
        ),
        (
            {"mismatch": "icepop", "mismatch_low": 6.0, **RECOMPUTE},
            "mismatch_low=6.0 and mismatch_high=5.0 must satisfy 0 <= low < high",
        ),
        (
            {"mismatch": "truncated", "mismatch_low": -1.0, **RECOMPUTE},
            "mismatch_low=-1.0 and mismatch_high=2.0 must satisfy 0 <= low < high",
        ),
        (
            {"rejection": "k2", "rejection_high": -0.5},
            "rejection_low=0.0 and rejection_high=-0.5 must satisfy 0 <= low < high",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    for kind in RECIPES.values():
        # One recipe has weights of its own, and they divide by what was drawn from.
        plain = {"mismatch": None, "mismatch_denominator": None}
        if "mismatch" in settings:
            plain["mismatch_denominator"] = "policy"
        with pytest.raises(ValueError, match=re.escape(message)):
            kind(**{**plain, **settings})


def test_when_the_trainer_scores_first():
    # HAPO for the entropies that the next step is sampled by.
    assert [name for name, kind in RECIPES.items() if kind().rescores] == ["hapo"]
    assert Grpo(old_logprobs="recompute").rescores
    assert Grpo(rejection="geometric").rescores
    # R2 records in that pass, R3 has the record of the sampler.
    assert Grpo(router_replay="R2").rescores and not Grpo(router_replay="R3").rescores
