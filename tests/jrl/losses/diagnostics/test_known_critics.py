"""Diagnostics of critics and advantages that are known: published numbers, and what must come."""

import jax
import numpy as np
import pytest
from batches import MASK, numpy_batch
from compiled import jitted

import jrl
from jrl import diagnostics


def test_the_variance_between_responses_is_told_from_rounding():
    draw = np.random.default_rng(0)
    noise = np.asarray(draw.normal(size=(6, 500)), np.float32)
    noise = noise - np.mean(noise, axis=-1, keepdims=True)
    lengths = np.array([[500], [499], [333], [250], [77], [3]])
    equal = jitted.diagnostics.within_between_variance(
        np.full((6, 500), 1e7 / 3), np.arange(500)[None] < lengths
    )
    assert equal.between > 1e-2  # of rounding alone
    assert equal.ratio == 0
    means = np.array([[-1.0], [1.0], [-1.0], [1.0], [-1.0], [1.0]]) / 16
    apart = jitted.diagnostics.within_between_variance(1000 + means + noise, np.ones((6, 500)))
    np.testing.assert_allclose(apart.between, 1 / 256, rtol=1e-2)
    np.testing.assert_allclose(apart.ratio, 256 * np.var(noise), rtol=1e-2)


# BIAS-1
EXACT, ERRORS = np.array([0.5, 0.55, 0.6, 0.7, 0.9]), np.array([0.2, 0.15, 0.1, 0.05, 0.02])


def test_vector_bias_1():
    ones, rewards = np.ones(5), np.eye(5)[-1]
    bias = jitted.diagnostics.bootstrap_bias(ERRORS, ones, 0.9)
    np.testing.assert_allclose(bias, [0.029508, 0.01612, 0.0068, 0.002, 0], atol=1e-6)
    exact, _ = jitted.gae(rewards, EXACT, ones, lam=0.9)
    np.testing.assert_allclose(exact, [0.38741, 0.3749, 0.361, 0.29, 0.1], atol=1e-6)
    found, _ = jitted.gae(rewards, EXACT + ERRORS, ones, lam=0.9)
    np.testing.assert_allclose(found, [0.216918, 0.24102, 0.2678, 0.242, 0.08], atol=1e-6)
    difference = [-0.170492, -0.13388, -0.0932, -0.048, -0.02]
    np.testing.assert_allclose(found - exact, difference, atol=1e-6)
    np.testing.assert_allclose(bias - ERRORS, difference, atol=1e-6)


@pytest.mark.slow
def test_the_identity_of_the_bias_holds_with_holes_and_any_lambda():
    b = numpy_batch(3)
    with jax.enable_x64(True):
        arrays = b
        lam, gamma, mask = arrays["lam"], arrays["gamma"], arrays["mask"]

        def advantages(values):
            return jrl.gae(arrays["rewards"], values, mask, lam=lam, gamma=gamma)[0]

        errors = np.where(mask, arrays["returns"], 0)
        bias = jitted.diagnostics.bootstrap_bias(errors, mask, lam, gamma=gamma)
        difference = advantages(arrays["values"] + errors) - advantages(arrays["values"])
        np.testing.assert_allclose(difference, bias - errors, rtol=1e-11, atol=1e-13)
        unbiased = jitted.diagnostics.bootstrap_bias(errors, mask, 1.0)
        np.testing.assert_allclose(unbiased, np.zeros(mask.shape), atol=1e-14)
        for row, found in zip(
            errors, jitted.diagnostics.bootstrap_bias(errors, mask, lam), strict=True
        ):
            assert np.max(np.abs(found)) <= np.max(np.abs(row)) + 1e-12


def test_the_bound_holds_on_every_batch():
    for seed in range(5):
        b = numpy_batch(seed)
        arrays = (b[name] for name in ("returns", "advantages", "mask", "lam"))
        found = jitted.diagnostics.bootstrap_bias_bound(*arrays)
        assert found.bias <= found.bound


@pytest.mark.slow
def test_a_critic_that_learns_the_outcome_half_way():
    # 40 responses of 10 tokens; from the fifth on the critic knows the return, before it 1/2.
    outcomes = np.arange(40) % 2
    returns = np.repeat(outcomes[:, None], 10, 1).astype(np.float32)
    values = np.where(np.arange(10) < 5, 0.5, returns).astype(np.float32)
    rewards = np.zeros((40, 10), np.float32)
    rewards[:, -1] = outcomes
    mask = np.ones((40, 10), bool)

    @jax.jit
    def everything(rewards, values, returns, solved, mask):
        alone, _ = jrl.gae(rewards, values, mask, lam=0.0)
        full, _ = jrl.gae(rewards, values, mask, lam=1.0)
        return (
            diagnostics.by_position(values, returns, mask),
            diagnostics.calibration(values, solved, mask),
            diagnostics.td_concentration(rewards, values, mask),
            diagnostics.outcome_contradiction(rewards, values, alone, mask),
            diagnostics.outcome_contradiction(rewards, values, full, mask),
            diagnostics.lambda_sensitivity(rewards, values, mask, lam=1.0),
        )

    solved = outcomes[:, None].astype(bool)
    found, fit, credit, alone, full, same = everything(rewards, values, returns, solved, mask)
    np.testing.assert_allclose(found.explained_variance, [0] * 5 + [1] * 5)
    np.testing.assert_allclose(found.error, [0.5] * 5 + [0] * 5)
    np.testing.assert_array_equal(found.tokens, [40] * 10)
    assert not np.any(found.bias)

    assert float(fit.ece) == 0 and float(fit.brier) == 0.125
    # One error of 1/2 on the fifth token is all there is.
    np.testing.assert_allclose(credit, [0.9, 1.0, 0.0], atol=1e-6)
    # With lam = 0 every token but that one has an advantage of 0.
    assert float(alone) == pytest.approx(0.9)
    assert float(full) == 0.5
    np.testing.assert_allclose(same.correlation, [1], rtol=1e-6)
    np.testing.assert_array_equal(same.sign_agreement, [1])


def test_returns_that_vary_are_told_from_rounding():
    draw = np.random.default_rng(0)
    returns = np.full((4, 300), 1e6 / 3, np.float32)
    values = returns + np.asarray(draw.normal(size=(4, 300)), np.float32)
    mask = np.ones((4, 300))
    assert not jitted.diagnostics.by_position(
        values, returns, mask, num_bins=3
    ).explained_variance.any()
    returns = 1000 + np.where(np.arange(300)[None] % 2 == 0, 1 / 16, -1 / 16) + 0 * mask
    found = jitted.diagnostics.by_position(returns + 0.5, returns, mask, num_bins=3)
    np.testing.assert_allclose(found.explained_variance, 1, atol=1e-3)


def test_what_the_mask_hides_has_no_position():
    positions = jitted.diagnostics.relative_position(np.array([0, 1, 0, 1, 0]), num_bins=2)
    assert positions.tolist() == [0, 0, 0, 1, 0]


def test_a_response_whose_advantage_is_zero_is_neither_good_nor_bad():
    advantages = np.array([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [-1.0, -1.0, 0.0], [2.0, 0.0, 0.0]])
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]])
    found = jitted.diagnostics.negative_share(advantages, mask)
    assert (found.responses, found.length, found.other_length) == (0.25, 2, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_gap_of_the_telescoping_sum_is_what_rounding_leaves(sign):
    # 1e8 - 1 is 1e8 in float32, so that one of the three errors is off by one.
    values = sign * np.array([[0.0, 1e8, 1.0], [0.0, 1.0, 2.0]])
    found = jitted.diagnostics.td_concentration(np.zeros((2, 3)), values, np.ones((2, 3)))
    assert found.identity_gap == 1


def test_advantages_of_a_group_have_no_variance_within():
    mask = MASK
    flat = np.array([1.0, -1.0, 0.5, 0, 2.0])[:, None] * np.ones(MASK.shape)
    found = jitted.diagnostics.within_between_variance(flat, mask)
    assert float(found.within) == 0 and float(found.ratio) == 0 and float(found.between) > 0
    nothing = jitted.diagnostics.within_between_variance(np.full(MASK.shape, 0.1), mask)
    assert float(nothing.ratio) == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, 1000])
def test_reach_of_a_constant_and_of_an_adaptive_lambda(length):
    mask = np.ones((1, length), bool)
    fixed = jitted.diagnostics.terminal_reach(mask, lam=0.95)
    # 0.95^k > 0.01 for k up to 89.
    assert float(fixed.tokens) == 90
    np.testing.assert_allclose(fixed.share, 90 / length, rtol=1e-6)
    np.testing.assert_allclose(fixed.horizon, 20, rtol=1e-4)
    lam = jitted.length_adaptive_lambda(np.array([length]), alpha=0.05)[:, None]
    adaptive = jitted.diagnostics.terminal_reach(mask, lam=lam)
    np.testing.assert_allclose(adaptive.share, 4.6 * 0.05, atol=0.03)
    endless = jitted.diagnostics.terminal_reach(mask, lam=1.0)
    assert np.isposinf(endless.horizon)
    assert float(endless.share) == 1 and float(endless.relative_horizon) == 1


def test_a_weight_at_the_threshold_is_not_felt():
    # Weights of 1, 1/2 and 1/4 from the last token on.
    assert jitted.diagnostics.terminal_reach(np.ones((1, 4)), lam=0.5, threshold=0.25).tokens == 2


def test_the_guard_is_where_lambda_is_at_its_floor():
    lengths = np.array([0, 5, 10, 19, 20, 21, 40, 400, 4000])
    for alpha, floor in ((0.05, 0.0), (0.05, 0.95), (1.5, 0.0)):
        lam = jrl.length_adaptive_lambda(lengths, alpha=alpha, floor=floor)[1:]
        expected = np.mean(np.asarray(lam) <= floor + 1e-6)
        found = diagnostics.guard_rate(lengths, alpha=alpha, floor=floor)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_lengths_of_100_and_2000_tokens():
    mask = np.arange(2000) < np.array([[100], [2000]])
    share = jitted.diagnostics.length_share(mask, edges=(100,))
    np.testing.assert_allclose(share.tokens, [0.048, 0.952], atol=5e-4)
    np.testing.assert_allclose(share.responses, [0.5, 0.5])
    weights = jax.jit(jax.grad(jrl.aggregate))(np.zeros(mask.shape), mask)
    np.testing.assert_allclose(weights.sum(1), share.tokens, rtol=1e-5)


def test_groups_count_once_whatever_their_size():
    correct = np.array([1, 1, 1, 1, 0, 0, 1, 0], bool)
    found = jitted.diagnostics.group_degeneracy(correct, np.array([3, 3, 3, 3, 8, 8, -1, -1]))
    np.testing.assert_allclose(found, [1 / 3, 1 / 3, 0.5, 2 / 3, 1 / 6], rtol=1e-6)


def test_a_value_outside_the_rewards_counts_as_certain():
    found = jitted.diagnostics.calibration(
        np.array([[-3.0, 7.0]]), np.array([[1]]), np.ones((1, 2))
    )
    np.testing.assert_allclose(found.brier, 0.5)
    np.testing.assert_array_equal(found.tokens, [1, *[0] * 8, 1])
