"""GAE and other estimators along a response: ends and cuts, packed sequences, rewards to come."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, batch
from compiled import jitted
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jrl


def test_gae_ignores_the_bootstrap_of_terminated_responses():
    b = batch(0)
    arrays = (b["rewards"], b["values"], b["mask"])
    ended = np.array([True, False, True, False, False])
    bootstrap = np.where(ended, np.nan, b["scores"])
    mixed = jitted.gae(*arrays, bootstrap_value=bootstrap, terminated=ended)
    without = jitted.gae(*arrays)
    with_it = jitted.gae(*arrays, bootstrap_value=b["scores"])
    for result, end, cut in zip(mixed, without, with_it, strict=True):
        np.testing.assert_array_equal(result, np.where(ended[:, None], end, cut))
    assert np.any(without[0] != with_it[0])


def test_gae_of_packed_sequences_cut_by_gamma_zero():
    b = batch(1)
    # The second row, which has a hole, then the first, in one row.
    packed = {n: np.concatenate([b[n][1], b[n][0]])[None] for n in ("rewards", "values", "mask")}
    gamma = np.full((1, 14), 0.9)
    gamma[0, [6, 10]] = 0.0
    together = jitted.gae(packed["rewards"], packed["values"], packed["mask"], gamma=gamma, lam=0.7)
    apart = jitted.gae(b["rewards"], b["values"], b["mask"], gamma=0.9, lam=0.7)
    for one, two in zip(together, apart, strict=True):
        np.testing.assert_allclose(one[0], np.concatenate([two[1], two[0]]), rtol=1e-6, atol=1e-7)


def test_decoupled_gae_is_gae_twice():
    b = batch(2)
    arrays = (b["rewards"], b["values"], b["mask"])
    advantages, returns = jitted.decoupled_gae(*arrays, gamma=0.9, lam_policy=0.3, lam_critic=0.8)
    np.testing.assert_array_equal(advantages, jitted.gae(*arrays, gamma=0.9, lam=0.3)[0])
    np.testing.assert_array_equal(returns, jitted.gae(*arrays, gamma=0.9, lam=0.8)[1])
    defaults = jitted.decoupled_gae(*arrays)
    np.testing.assert_array_equal(defaults[0], jitted.gae(*arrays, lam=0.95)[0])
    np.testing.assert_array_equal(defaults[1], jitted.gae(*arrays, lam=1.0)[1])


def test_extended_gae_ignores_the_last_tokens_of_cut_responses():
    b = batch(3)
    arrays = (b["rewards"], b["values"], b["mask"])
    finished = jitted.extended_gae(*arrays, np.zeros(5, bool), ignore_last=2)
    np.testing.assert_array_equal(finished[0], jitted.gae(*arrays)[0])
    np.testing.assert_array_equal(finished[2], MASK)
    cut = jitted.extended_gae(*arrays, np.ones(5, bool), ignore_last=2)
    expected = MASK.copy()
    for row, times in ((0, (2, 3)), (1, (5, 6)), (2, (4, 5)), (4, (3,))):
        expected[row, list(times)] = False
    np.testing.assert_array_equal(cut[2], expected)
    assert not np.any(np.where(expected, 0, cut[0]))


def test_reinforce_plus_plus_is_gae_with_zero_values():
    b = batch(4)
    plain = jitted.reinforce_plus_plus_advantages(
        b["rewards"], b["mask"], gamma=0.9, whitened=False
    )
    nothing = np.zeros_like(b["rewards"])
    expected, _ = jitted.gae(b["rewards"], nothing, b["mask"], gamma=0.9, lam=1.0)
    np.testing.assert_allclose(plain, expected, rtol=1e-6)
    whitened = jitted.reinforce_plus_plus_advantages(b["rewards"], b["mask"], gamma=0.9)
    np.testing.assert_allclose(whitened, jitted.whiten(plain, b["mask"]), rtol=1e-6)


def test_optimal_token_baseline_of_one_response():
    rewards, mask = np.array([[0.0, 2.0, 0.0]]), np.array([[1, 1, 0]])
    group, logprobs, half = np.array([0]), np.full((1, 3), -0.5), np.full((1, 3), 0.5)
    single = jitted.optimal_token_baseline(rewards, group, logprobs, half, mask)
    np.testing.assert_allclose(single, np.zeros((1, 3)), atol=1e-6)
    tail = jitted.optimal_token_baseline(rewards, group, logprobs, half, mask, lone_tail=True)
    assert tail.tolist() == [[2, 2, 0]]
    ones = np.ones((1, 3))
    sure = jitted.optimal_token_baseline(rewards, group, 0 * ones, ones, mask)
    assert sure.tolist() == [[2, 2, 0]]


def test_whiten_with_and_without_least_variance():
    x, ones = np.array([[1.0, 1.0, 4.0]]), np.ones((1, 3))
    loose = jitted.whiten(x, ones, unbiased=False, epsilon=0.0)
    np.testing.assert_allclose(loose, (x - 2) / jnp.sqrt(2.0), rtol=1e-6)
    tight = jitted.whiten(x, ones, unbiased=False, epsilon=0.0, min_variance=4.0)
    np.testing.assert_allclose(tight, (x - 2) / 2, rtol=1e-6)
    assert jitted.whiten(x, np.array([[1, 1, 0]]), epsilon=0.0).tolist() == [[0, 0, 0]]
    assert np.isnan(jitted.whiten(np.array([[np.nan, 1.0, 4.0]]), ones, epsilon=0.0)).all()


@pytest.mark.slow
def test_row_estimators_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    rewards, values = (np.asarray(random.normal(0, 1, (16, 6)), np.float32) for _ in range(2))
    mask = random.integers(0, 2, (16, 6)).astype(bool)
    mask[:2] = False
    ended, bootstrap = mask[:, 0], values[:, 0]

    def estimates(rewards, values, mask, ended, bootstrap):
        arrays = (rewards, values, mask)
        ends = {"bootstrap_value": bootstrap, "terminated": ended}
        return (
            jrl.gae(*arrays, **ends),
            jrl.decoupled_gae(*arrays, **ends),
            jrl.extended_gae(*arrays, ended, ignore_last=1),
            jrl.reinforce_plus_plus_advantages(rewards, mask, whitened=False),
            jrl.remax_advantages(rewards, bootstrap, mask),
        )

    arrays = (rewards, values, mask, ended, bootstrap)
    cut = jax.shard_map(estimates, mesh=mesh, in_specs=(P("data"),) * 5, out_specs=P("data"))
    chex.assert_trees_all_close(
        jax.jit(cut)(*arrays), jax.jit(estimates)(*arrays), rtol=1e-5, atol=1e-6
    )


def test_optimal_token_baseline_keeps_groups_apart():
    # As many groups as rows, of which each is longer than there are rows.
    draw = np.random.default_rng(0)
    rewards = np.asarray(draw.normal(size=(2, 4)), np.float32)
    logprobs = -np.asarray(draw.exponential(size=(2, 4)), np.float32)
    squares, mask = np.exp(-np.abs(rewards)), np.ones((2, 4))
    apart = jitted.optimal_token_baseline(
        rewards, np.array([0, 1]), logprobs, squares, mask, lone_tail=False
    )
    for row in range(2):
        own = (x[row : row + 1] for x in (rewards, np.zeros(2, int), logprobs, squares, mask))
        single = jitted.optimal_token_baseline(*own, lone_tail=False)
        np.testing.assert_allclose(apart[row], single[0], rtol=1e-6, atol=1e-6)


def test_optimal_token_baseline_default_weights_are_one():
    draw = np.random.default_rng(1)
    rewards = np.asarray(draw.normal(size=(3, 4)), np.float32)
    arrays = (rewards, np.zeros(3, int), -np.abs(rewards), np.exp(-np.abs(rewards)))
    mask = np.ones((3, 4))
    without = jitted.optimal_token_baseline(*arrays, mask, epsilon=1.0)
    ones = jitted.optimal_token_baseline(*arrays, mask, epsilon=1.0, importance_weights=mask)
    np.testing.assert_array_equal(without, ones)


def test_extended_gae_bootstraps_with_the_last_value():
    values, ones = np.array([[0.5, 0.25, -0.75, 9.0]]), np.ones(1)
    mask, cut = np.array([[1, 1, 1, 0]]), np.array([True])
    given = (0 * values, values, mask, cut)
    actual = jitted.extended_gae(*given, lam=0.5)
    expected = jitted.extended_gae(*given, lam=0.5, bootstrap_value=-0.75 * ones)
    chex.assert_trees_all_equal(actual, expected)


def test_whiten_of_two_tokens():
    x, mask = np.array([[1.0, 3.0, 7.0]]), np.array([[1, 1, 0]])
    np.testing.assert_allclose(jitted.whiten(x, mask)[0], [-(0.5**0.5), 0.5**0.5, 0], rtol=1e-6)
    biased = jitted.whiten(x, mask, unbiased=False)
    np.testing.assert_allclose(biased[0], [-1, 1, 0], rtol=1e-6)


def test_length_adaptive_lambda_has_no_gradient():
    slope = jax.jit(jax.grad(lambda n: jnp.sum(jrl.length_adaptive_lambda(n, alpha=0.1))))
    assert not np.any(slope(np.array([30.0, 400.0])))


def test_remax_is_zero_for_a_sample_as_good_as_greedy():
    b = batch(5)
    total = np.sum(np.where(b["mask"], b["rewards"], 0), 1)
    advantages = jitted.remax_advantages(b["rewards"], total, b["mask"])
    first = np.argmax(MASK, 1)
    np.testing.assert_allclose(advantages[np.arange(5), first], np.zeros(5), atol=1e-6)
    better = jitted.remax_advantages(b["rewards"], total - 1, b["mask"])
    np.testing.assert_allclose(better, np.where(MASK, advantages + 1, 0), atol=1e-6)


few = settings(max_examples=10, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)

# The inputs of GAE-1; the 9 lies under the mask.
REWARDS = np.array([[0.0, 0, 0, 1], [0, 0, -1, 0]])
VALUES = np.array([[0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, 9]])
ONES = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
GAE = jax.jit(jrl.gae)


def test_gae_bootstrap_values_none_zero_and_one():
    ones = np.ones((2, 3))
    ended, _ = jitted.gae(0 * ones, ones, ones, lam=0.0)
    zero, _ = jitted.gae(0 * ones, ones, ones, lam=0.0, bootstrap_value=0.0)
    cut, _ = jitted.gae(0 * ones, ones, ones, lam=0.0, bootstrap_value=1.0)
    np.testing.assert_array_equal(ended, zero)
    np.testing.assert_array_equal(ended, [[0, 0, -1], [0, 0, -1]])
    np.testing.assert_array_equal(cut, np.zeros((2, 3)))


@given(seeds)
@few
def test_gae_undiscounted_errors_telescope(seed):
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


def test_gae_reads_the_terminal_reward_at_the_last_sampled_token():
    mask = np.array([1, 1, 0])
    values = np.zeros(3)
    kept, _ = jitted.gae(np.array([0.0, 1, 0]), values, mask, lam=1.0)
    unread, _ = jitted.gae(np.array([0.0, 0, 1]), values, mask, lam=1.0)
    np.testing.assert_array_equal(kept, [1, 1, 0])
    np.testing.assert_array_equal(unread, [0, 0, 0])


def test_gae_accepts_integer_rewards():
    result = jitted.gae(REWARDS.astype(int), VALUES, ONES)
    np.testing.assert_array_equal(result, jitted.gae(REWARDS, VALUES, ONES))
