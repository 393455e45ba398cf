"""REINFORCE, CISPO, VESPO, SAPO and DRO: published numbers, weights and gates, limits."""

import chex
import jax
import numpy as np
import pytest
from batches import batch
from compiled import jitted
from policy_cases import arrays, per_token, value_and_slope, without_old

import jrl


def test_gpg_loss_is_reinforce_loss():
    assert jrl.gpg_loss is jrl.reinforce_loss


def test_cispo_without_bounds_is_importance_weighted_reinforce():
    b = batch(1)

    def cispo(logprobs):
        inputs = (logprobs, *arrays(b)[1:])
        return jrl.cispo_loss(*inputs, clip_high=None)[0]

    weights = np.exp(b["logprobs"] - b["old_logprobs"])

    def weighted(logprobs):
        inputs = (logprobs, b["advantages"], b["mask"])
        return jrl.reinforce_loss(*inputs, importance_weights=weights)[0]

    actual, expected = (jax.jit(jax.value_and_grad(f))(b["logprobs"]) for f in (cispo, weighted))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_cispo_bounds_are_distances_from_one():
    one = np.ones(1)
    far, near = (5 * one, 0 * one, one, one), (0 * one, 5 * one, one, one)
    for inputs, settings, weight in (
        (far, {}, 1.2),
        (far, {"clip_high": 4.0}, 5.0),
        (far, {"clip_high": None}, np.exp(5)),
        (near, {}, np.exp(-5)),
        (near, {"clip_low": 0.3}, 0.7),
        (near, {"clip_low": 10}, np.exp(-5)),
        (near, {"clip_low": None}, np.exp(-5)),
    ):
        _, slope = value_and_slope(jrl.cispo_loss, inputs, **settings)
        np.testing.assert_allclose(slope, [-weight], rtol=1e-5)


def vespo_weight(log_w, advantage, tokens=4, **settings):
    """phi of a response whose log-ratio is spread evenly over its tokens."""
    ones = np.ones((1, tokens), np.float32)
    log_ratio = log_w / tokens * ones
    inputs = (-ones, -ones - log_ratio, advantage * ones, ones)
    return jitted.vespo_loss(*inputs, **settings)[1]["phi"].value()


@pytest.mark.parametrize(("advantage", "peak"), [(1, 2 / 3), (0, 2 / 3), (-1, 3 / 2)])
def test_vespo_weight_is_one_at_one_and_peaks_at_k_over_lam(advantage, peak):
    assert vespo_weight(0.0, advantage) == pytest.approx(1)
    top = vespo_weight(np.log(peak), advantage)
    k, lam = (2, 3) if advantage >= 0 else (3, 2)
    assert top == pytest.approx(np.exp(lam + k * np.log(peak) - lam * peak), rel=1e-5)
    assert all(vespo_weight(np.log(peak * step), advantage) < top for step in (0.9, 1.1))


@pytest.mark.parametrize("limit", [20.0, None])
@pytest.mark.parametrize("log_w", [-1e4, -75.0, 75.0, 1e4])
def test_vespo_weight_vanishes_far_from_one(log_w, limit):
    for advantage in (1, -1):
        assert vespo_weight(log_w, advantage, max_log_ratio=limit) < 1e-30


def test_vespo_weight_vanishes_for_an_infinite_ratio():
    one = np.ones((1, 2))
    inputs = (-one, np.array([[-np.inf, -1.0]]), one, one)
    losses, slope = value_and_slope(jrl.vespo_loss, inputs, max_log_ratio=None)
    assert not losses.any() and not slope.any()


def test_sapo_of_equal_policies_is_two_over_tau():
    one = np.ones(2)
    losses = per_token(jrl.sapo_loss, one, one, np.array([1.0, -1.0]), one, tau_negative=4)
    np.testing.assert_allclose(losses, [-2, 0.5])
    # A token of advantage 0 takes the temperature of the negative ones.
    _, metrics = jitted.sapo_loss(2 * one, one, 0 * one, one, tau_negative=4)
    p = 1 / (1 + np.exp(-4 * (np.e - 1)))
    np.testing.assert_allclose(metrics["gate"].value(), 4 * p * (1 - p), rtol=1e-3)


def test_dro_gradient_is_zero_at_its_optimum():
    one = np.ones(3)
    advantages, beta = np.array([1.0, -0.5, 2.0]), 0.25
    at_optimum = -3 * one + advantages / beta
    _, slope = value_and_slope(jrl.dro_loss, (at_optimum, -3 * one, advantages, one), beta=beta)
    np.testing.assert_allclose(slope, 0, atol=1e-6)
    losses, slope = value_and_slope(jrl.dro_loss, (-2 * one, -3 * one, advantages, one), beta=beta)
    np.testing.assert_allclose(losses, 2 * advantages + 0.5 * beta, rtol=1e-6)
    np.testing.assert_allclose(slope, -(advantages - beta), rtol=1e-6)
    _, metrics = jitted.dro_loss(-2 * one, -3 * one, advantages, one, beta=beta)
    np.testing.assert_allclose(metrics["dro_penalty"].value(), 0.125)


def test_dro_without_a_penalty_is_reinforce():
    b = batch(2)
    actual, _ = jitted.dro_loss(*arrays(b), beta=0)
    np.testing.assert_allclose(actual, jitted.reinforce_loss(*without_old(b))[0], rtol=1e-6)
