"""Advantage estimators against worked vectors, slow loops and identities."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import BATCH, MASK, batch, numpy_batch
from compiled import jitted
from hypothesis import given, settings
from hypothesis import strategies as st

import jrl

few = settings(max_examples=10, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)

# The inputs of GAE-1; the 9 lies under the mask.
REWARDS = np.array([[0.0, 0, 0, 1], [0, 0, -1, 0]])
VALUES = np.array([[0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, 9]])
ONES = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
GAE = jax.jit(jrl.gae)


@pytest.mark.parametrize(
    ("lam", "advantages", "returns"),
    [
        (
            0.95,
            [[0.456725, 0.3755, 0.29, 0.2], [-1.278, -1.24, -1.2, 0]],
            [[0.956725, 0.9755, 0.99, 1], [-0.878, -0.94, -1, 0]],
        ),
        (1.0, [[0.5, 0.4, 0.3, 0.2], [-1.4, -1.3, -1.2, 0]], [[1, 1, 1, 1], [-1, -1, -1, 0]]),
        (
            0.0,
            [[0.1, 0.1, 0.1, 0.2], [-0.1, -0.1, -1.2, 0]],
            [[0.6, 0.7, 0.8, 1], [0.3, 0.2, -1, 0]],
        ),
    ],
)
def test_vector_gae_1(lam, advantages, returns):
    result = jitted.gae(REWARDS, VALUES, ONES, lam=lam)
    np.testing.assert_allclose(result[0], advantages, atol=1e-6)
    np.testing.assert_allclose(result[1], returns, atol=1e-6)


def test_vector_gae_2_whitening():
    advantages, _ = jitted.gae(REWARDS, VALUES, ONES)
    whitened = [[0.947699, 0.851355, 0.74994, 0.643188], [-1.109925, -1.064852, -1.017406, 0]]
    np.testing.assert_allclose(jitted.whiten(advantages, ONES), whitened, atol=2e-6)


def test_vector_gae_3_hole_in_the_mask():
    rewards, values = np.array([0.0, 0, 0, 0, 1]), np.array([0.2, 0.3, 7, 0.5, 0.6])
    result = jitted.gae(rewards, values, np.array([1, 1, 0, 1, 1]), lam=0.5)
    np.testing.assert_allclose(result[0], [0.275, 0.35, 0, 0.3, 0.4], atol=1e-6)
    np.testing.assert_allclose(result[1], [0.475, 0.65, 0, 0.8, 1], atol=1e-6)


def test_vector_bias_1():
    true = np.array([0.5, 0.55, 0.6, 0.7, 0.9])
    error = np.array([0.2, 0.15, 0.1, 0.05, 0.02])
    rewards = np.array([0.0, 0, 0, 0, 1])
    exact, _ = jitted.gae(rewards, true, np.ones(5), lam=0.9)
    biased, _ = jitted.gae(rewards, true + error, np.ones(5), lam=0.9)
    np.testing.assert_allclose(exact, [0.38741, 0.3749, 0.361, 0.29, 0.1], atol=1e-6)
    np.testing.assert_allclose(biased, [0.216918, 0.24102, 0.2678, 0.242, 0.08], atol=1e-6)


def test_vector_lambda_2_decoupled():
    lam = jitted.length_adaptive_lambda(ONES.sum(1), alpha=0.5)
    np.testing.assert_allclose(lam, [0.5, 1 / 3], atol=1e-6)
    advantages, _ = jitted.gae(REWARDS, VALUES, ONES, lam=lam[:, None])
    expected = [[0.2, 0.2, 0.2, 0.2], [-0.266667, -0.5, -1.2, 0]]
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    _, returns = jitted.gae(REWARDS, VALUES, ONES, lam=1.0)
    np.testing.assert_allclose(returns, [[1, 1, 1, 1], [-1, -1, -1, 0]], atol=1e-6)
    assert not np.any(jitted.length_adaptive_lambda(ONES.sum(1), alpha=0.05))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("hyper", ["scalars", "per row", "per token", "bootstrap"])
def test_gae_oracle(seed, hyper):
    b = numpy_batch(seed)
    gamma, lam, bootstrap = 0.97, 0.8, None
    if hyper == "per row":
        gamma, lam = b["gamma"][:, :1], b["lam"][:, :1]
    if hyper == "per token":
        gamma, lam = b["gamma"], b["lam"]
    if hyper == "bootstrap":
        bootstrap = b["values"][:, 0]
    expected = oracles.gae(b["rewards"], b["values"], MASK, gamma, lam, bootstrap)
    with jax.enable_x64(True):
        result = jitted.gae(
            *(b["rewards"], b["values"], MASK),
            gamma=gamma,
            lam=lam,
            bootstrap_value=bootstrap,
        )
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-13)


def test_a_scalar_bootstrap_and_zero_mean_different_things_from_none_and_off():
    ones = np.ones((2, 3))
    ended, _ = jitted.gae(0 * ones, ones, ones, lam=0.0)
    zero, _ = jitted.gae(0 * ones, ones, ones, lam=0.0, bootstrap_value=0.0)
    cut, _ = jitted.gae(0 * ones, ones, ones, lam=0.0, bootstrap_value=1.0)
    np.testing.assert_array_equal(ended, zero)
    np.testing.assert_array_equal(ended, [[0, 0, -1], [0, 0, -1]])
    np.testing.assert_array_equal(cut, np.zeros((2, 3)))


@given(seeds)
@few
def test_undiscounted_errors_sum_to_return_minus_value(seed):
    b = batch(seed)
    advantages, returns = GAE(b["rewards"], b["values"], b["mask"], lam=1.0)
    errors, _ = GAE(b["rewards"], b["values"], b["mask"], lam=0.0)
    rewards, values, errors = (np.asarray(x) for x in (b["rewards"], b["values"], errors))
    for row in range(BATCH):
        if MASK[row].any():
            first = np.argmax(MASK[row])
            total = rewards[row][MASK[row]].sum()
            value = values[row, first]
            np.testing.assert_allclose(errors[row].sum(), total - value, atol=1e-5)
            np.testing.assert_allclose(advantages[row, first], total - value, atol=1e-5)
            np.testing.assert_allclose(returns[row, first], total, atol=1e-5)


def test_the_terminal_reward_belongs_on_the_last_sampled_token():
    mask = np.array([1, 1, 0])
    values = np.zeros(3)
    kept, _ = jitted.gae(np.array([0.0, 1, 0]), values, mask, lam=1.0)
    unread, _ = jitted.gae(np.array([0.0, 0, 1]), values, mask, lam=1.0)
    np.testing.assert_array_equal(kept, [1, 1, 0])
    np.testing.assert_array_equal(unread, [0, 0, 0])


def test_integer_rewards():
    result = jitted.gae(REWARDS.astype(int), VALUES, ONES)
    np.testing.assert_array_equal(result, jitted.gae(REWARDS, VALUES, ONES))


LAMBDA_1 = [
    (0.05, 10, 0, 0.95),
    (0.05, 20, 0, 0.95),
    (0.05, 21, 0.047619, 0.95),
    (0.05, 40, 0.5, 0.95),
    (0.05, 100, 0.8, 0.95),
    (0.05, 400, 0.95, 0.95),
    (0.05, 1000, 0.98, 0.98),
    (0.05, 8192, 0.997559, 0.997559),
    (0.05, 24576, 0.999186, 0.999186),
    (0.4, 10, 0.75, 0.95),
    (0.4, 20, 0.875, 0.95),
    (0.4, 21, 0.880952, 0.95),
    (0.4, 40, 0.9375, 0.95),
    (0.4, 100, 0.975, 0.975),
    (0.4, 400, 0.99375, 0.99375),
    (0.4, 1000, 0.9975, 0.9975),
    (0.4, 8192, 0.999695, 0.999695),
    (0.4, 24576, 0.999898, 0.999898),
    (1.5, 10, 0.933333, 0.95),
    (1.5, 20, 0.966667, 0.966667),
    (1.5, 21, 0.968254, 0.968254),
    (1.5, 40, 0.983333, 0.983333),
    (1.5, 100, 0.993333, 0.993333),
    (1.5, 400, 0.998333, 0.998333),
    (1.5, 1000, 0.999333, 0.999333),
    (1.5, 8192, 0.999919, 0.999919),
    (1.5, 24576, 0.999973, 0.999973),
]


@pytest.mark.parametrize(("alpha", "length", "clamped", "floored"), LAMBDA_1)
def test_vector_lambda_1(alpha, length, clamped, floored):
    lengths = np.array([length])
    adaptive = jitted.length_adaptive_lambda(lengths, alpha=alpha)
    np.testing.assert_allclose(adaptive, [clamped], atol=1e-6)
    adaptive = jitted.length_adaptive_lambda(lengths, alpha=alpha, floor=0.95)
    np.testing.assert_allclose(adaptive, [floored], atol=1e-6)
    oracle = oracles.length_adaptive_lambda(length, alpha, 0.95)
    np.testing.assert_allclose(adaptive, [oracle], atol=1e-6)


@pytest.mark.parametrize(("alpha", "reach"), [(0.4, 0.082083), (1.5, 0.513426)])
def test_vector_lambda_1_reach(alpha, reach):
    with jax.enable_x64(True):
        lam = jitted.length_adaptive_lambda(np.array([24576.0]), alpha=alpha)
        np.testing.assert_allclose(lam**24575, [reach], atol=1e-6)


def test_lambda_of_nothing_is_the_floor_and_bad_settings_are_refused():
    assert jitted.length_adaptive_lambda(np.array([0, 1]), floor=0.25).tolist() == [
        0.25,
        0.25,
    ]
    with pytest.raises(ValueError, match="alpha=0 must be positive"):
        jrl.length_adaptive_lambda(jnp.array([1]), alpha=0)
    with pytest.raises(ValueError, match=r"floor=1.5 must lie in \[0, 1\]"):
        jrl.length_adaptive_lambda(jnp.array([1]), floor=1.5)


# The inputs of ADV-1: two groups of four.
SCORES = np.array([1.0, 0, 0, 1, 1, 0, 0, 0])
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])


def test_vector_adv_1_grpo():
    expected = [0.866024, -0.866024, -0.866024, 0.866024, 1.499997, -0.499999, -0.499999, -0.499999]
    np.testing.assert_allclose(jitted.grpo_advantages(SCORES, GROUPS), expected, atol=1e-6)


def test_vector_adv_1_without_the_scale():
    expected = [0.5, -0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]
    np.testing.assert_allclose(
        jitted.grpo_advantages(SCORES, GROUPS, scale=None), expected, atol=1e-6
    )


@pytest.mark.parametrize("scale", ["group", None])
@given(seeds)
@few
def test_grpo_oracle_for_groups_of_any_names_sizes_and_order(scale, seed):
    draw = np.random.default_rng(seed)
    names = draw.integers(-(2**31), 2**31, 4)
    groups, rewards = draw.choice(names, 11), draw.normal(0, 1, 11)
    expected = oracles.grpo(rewards, groups, scale, epsilon=1e-3)
    with jax.enable_x64(True):
        result = jitted.grpo_advantages(rewards, groups, scale=scale, epsilon=1e-3)
        np.testing.assert_allclose(result, expected, rtol=1e-10, atol=1e-12)


@given(seeds)
@few
def test_grpo_ignores_a_constant_and_follows_a_permutation(seed):
    draw = np.random.default_rng(seed)
    groups, rewards = draw.integers(0, 3, 11), draw.normal(0, 1, 11)
    order = draw.permutation(11)
    with jax.enable_x64(True):
        call = jitted.grpo_advantages
        result = call(rewards, groups)
        shifted = call(rewards + 5 * groups, groups)
        np.testing.assert_allclose(shifted, result, rtol=1e-9, atol=1e-12)
        permuted = call(rewards[order], groups[order])
        np.testing.assert_allclose(permuted, result[order], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_group_without_variance_gets_exactly_zero(size):
    # 0.1 is not a float32: the rounding of a mean of seven of them, over 1e-6, would be visible.
    rewards = np.array([0.1] * size + [0.0, 1.0])
    groups = np.array([4] * size + [9, 9])
    advantages = np.asarray(jax.jit(jrl.grpo_advantages)(rewards, groups))
    assert not np.any(advantages[:size])
    assert np.all(advantages[size:] != 0)


def test_grpo_of_integer_rewards_and_under_vmap():
    def both_ways(scores, groups):
        stacked = jnp.stack([scores, scores[::-1]])
        return jax.vmap(jrl.grpo_advantages)(stacked, jnp.stack([groups, groups])), (
            jrl.grpo_advantages(scores.astype(int), groups),
            jrl.grpo_advantages(scores[::-1], groups),
        )

    stacked, alone = jax.jit(both_ways)(SCORES, GROUPS)
    np.testing.assert_allclose(stacked, alone, atol=1e-6)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("keep_mean", [True, False])
def test_whiten_oracle(unbiased, keep_mean):
    x = numpy_batch(2)["advantages"] + 3
    expected = oracles.whiten(x, MASK, unbiased, keep_mean, epsilon=1e-3)
    with jax.enable_x64(True):
        result = jitted.whiten(
            x,
            MASK,
            unbiased=unbiased,
            keep_mean=keep_mean,
            epsilon=1e-3,
        )
        np.testing.assert_allclose(result, expected, rtol=1e-11)


@pytest.mark.parametrize("unbiased", [True, False])
def test_whiten_one_token(unbiased):
    x, mask = np.array([[3.0, 5.0]]), np.array([[False, True]])
    assert jitted.whiten(x, mask, unbiased=unbiased).tolist() == [[0, 0]]
    assert jitted.whiten(x, mask, unbiased=unbiased, keep_mean=True).tolist() == [[0, 5]]
