"""DPPO: which tokens it keeps, and what it does with them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch
from compiled import compiled
from policy_cases import assert_a_cut_sums_to_the_whole

import jrl

NAMES = ("logprobs", "old_logprobs", "advantages", "mask")
kinds = pytest.mark.parametrize("kind", ["tv", "kl"])
# Some of the tokens of a random batch move further than this.
BOUND = {"tv": 0.1, "kl": 0.05}


step = compiled(jax.value_and_grad(jrl.dppo_loss, has_aux=True))


@kinds
def test_dppo_on_policy_is_reinforce(kind):
    b = batch(1)
    logprobs = -np.abs(b["logprobs"])

    def reinforce(logprobs):
        return jrl.aggregate(-b["advantages"] * logprobs, b["mask"])

    settings = {"kind": kind, "max_divergence": 0.0}
    actual = step(logprobs, logprobs, b["advantages"], b["mask"], **settings)
    expected = jax.jit(jax.value_and_grad(reinforce))(logprobs)
    np.testing.assert_allclose(actual[0][0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-6)


@kinds
def test_dppo_without_bounds_is_importance_weighted(kind):
    b = batch(2)
    arrays = (-np.abs(b["logprobs"]), *(b[name] for name in NAMES[1:]))
    _, slope = step(*arrays, kind=kind, max_divergence=float("inf"), max_ratio=None)
    wide = {"clip_low": float("inf"), "clip_high": float("inf")}
    expected = compiled(jax.grad(jrl.ppo_loss, has_aux=True))(*arrays, **wide)[0]
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


@pytest.mark.slow
@kinds
def test_dppo_of_pieces_adds_up(kind):
    def loss(b, **denominators):
        arrays = [-jnp.abs(b[name]) if "logprobs" in name else b[name] for name in NAMES]
        return jrl.dppo_loss(*arrays, kind=kind, max_divergence=BOUND[kind], **denominators)

    assert_a_cut_sums_to_the_whole(loss, range(8))


@kinds
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_dppo_of_probabilities_zero_and_one_is_finite(kind, advantage):
    logprobs = np.array([-np.inf, -1.0, 0.0, 0.0, -1.0, -500.0, -np.inf, 0.0])
    old = np.array([-1.0, -np.inf, 0.0, -1.0, 0.0, -1.0, 0.0, -np.inf])
    ones = np.ones_like(old)
    settings = {"kind": kind, "max_divergence": 0.1}
    (loss, metrics), slope = step(logprobs, old, advantage * ones, ones, **settings)
    chex.assert_tree_all_finite((loss, slope, [x.value() for x in metrics.values()]))


@kinds
def test_dppo_floors_log_probabilities_below_the_bound(kind):
    old, one = -np.ones(1), np.ones(1)
    settings = {"kind": kind, "max_divergence": 1.0, "max_log_ratio": 0.5}
    weight = np.exp(-0.5)
    for logprob, floored in ((-2.0, True), (-1.5, False)):
        (loss, _), slope = step(np.array([logprob]), old, one, one, **settings)
        np.testing.assert_allclose(loss, weight * 1.5, rtol=1e-6)
        np.testing.assert_allclose(slope, [0 if floored else -weight], rtol=1e-6)


@kinds
def test_dppo_advantage_of_zero_stops_falling_tokens(kind):
    low, high = np.log(np.array([0.1])), np.log(np.array([0.9]))
    settings = {"kind": kind, "max_divergence": 0.2}
    for logprobs, old, stopped_by in ((high, low, (1,)), (low, high, (0, -1))):
        for advantage in (1, 0, -1):
            arrays = (logprobs, old, np.full(1, float(advantage)), np.ones(1))
            (_, metrics), _ = step(*arrays, **settings)
            assert float(metrics["pg_clipfrac"].sum) == (advantage in stopped_by)


@kinds
def test_dppo_drops_a_certain_token_that_became_unlikely(kind):
    arrays = (np.log(np.array([0.1])), np.zeros(1), -np.ones(1), np.ones(1))
    for bound, dropped in ((0.5, 1), (3.0, 0)):
        (_, metrics), _ = step(*arrays, kind=kind, max_divergence=bound)
        assert float(metrics["pg_clipfrac"].sum) == dropped
