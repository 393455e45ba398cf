"""What one estimator that compares the responses of a group promises, and no other does."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from compiled import jitted

import jrl


def test_maxrl_averages_the_score_function_over_the_successes():
    rewards = np.array([1.0, 0, 0, 1, 0, 0, 0, 0])
    advantages = jitted.maxrl_advantages(rewards, np.zeros(8, int))
    score = np.arange(8.0) ** 2
    centred = score - score.mean()
    np.testing.assert_allclose((advantages * score).mean(), centred[[0, 3]].mean(), rtol=1e-6)


def test_a_negative_mean_turns_maxrl_around():
    found = jitted.maxrl_advantages(np.array([-1.0, -3.0]), np.array([0, 0]))
    assert found.tolist() == [-0.5, 0.5]


average = jax.jit(jrl.token_level_group_average)

grpo = jitted.grpo_advantages


@pytest.mark.slow
def test_the_fallback_is_of_whole_groups_and_at_the_bound():
    mask = np.arange(9)[None] < np.array([1, 9, 9, 9, 9, 1, 1])[:, None]
    rewards, groups = np.array([1.0, 0, 0, 0, 0, 1, 0]), np.array([0, 0, 0, 0, 0, 1, 1])
    plain = np.asarray(grpo(rewards, groups))
    tokens = np.asarray(average(rewards, groups, mask, epsilon=0.0))
    # 36 tokens against one: exactly 6 deviations above the mean.
    np.testing.assert_allclose(tokens[0, 0], 6, rtol=1e-6)
    above = average(rewards, groups, mask, epsilon=0.0, fallback=6.1)
    np.testing.assert_array_equal(above, tokens)
    below = np.asarray(average(rewards, groups, mask, epsilon=0.0, fallback=5.9))
    np.testing.assert_array_equal(below[:5], np.where(mask, plain[:, None], 0)[:5])
    np.testing.assert_array_equal(below[5:], tokens[5:])


@pytest.mark.slow
def test_the_fallback_looks_at_what_is_below_too_and_its_bound_belongs_to_it():
    # The other two rows are another group, which nothing befalls.
    mask = np.arange(9)[None] < np.array([1, 9, 9, 9, 9, 1, 1])[:, None]
    rewards, groups = np.array([0.0, 1, 1, 1, 1, 0, 0]), np.array([0, 0, 0, 0, 0, 1, 1])
    tokens = np.asarray(average(rewards, groups, mask, epsilon=0.0))
    lowest = float(tokens[0, 0])
    np.testing.assert_allclose(lowest, -6, rtol=1e-6)
    plain = np.where(mask, np.asarray(grpo(rewards, groups))[:, None], 0)
    for fallback, expected in ((-lowest, plain), (-lowest * 1.001, tokens)):
        found = average(rewards, groups, mask, epsilon=0.0, fallback=fallback)
        np.testing.assert_array_equal(found, expected)


def test_a_response_without_tokens_does_not_count_among_the_tokens():
    mask = np.array([[1, 1], [1, 0], [0, 0]])
    rewards, groups = np.array([1.0, 0.0, -100.0]), np.array([0, 0, 0])
    with_it = average(rewards, groups, mask)
    without = average(*(x[:2] for x in (rewards, groups, mask)))
    np.testing.assert_array_equal(with_it[:2], without)
    assert not np.any(with_it[2])


def test_rewards_far_from_zero_keep_their_digits():
    # All of these are numbers of float32, whose spacing at 8192 is 1 / 1024.
    rewards = 8192 + np.array([0.0, 1.0, 2.0, 5.0]) / 1024
    centred = jitted.dr_grpo_advantages(rewards, np.zeros(4, np.int32))
    np.testing.assert_array_equal(centred, np.array([-2, -1, 0, 3]) / 1024)


def test_singletons_and_no_epsilon():
    rewards, groups = np.array([3.0, 1.0, 2.0]), np.array([5, 6, 6])
    assert grpo(rewards, groups, scale=None, singleton="reward").tolist() == [3, -0.5, 0.5]
    with_epsilon = grpo(rewards, groups, singleton="reward", epsilon=1.0)
    assert with_epsilon[0] == 1.5
    assert grpo(rewards, groups, epsilon=0.0)[0] == 0
    assert np.all(np.isnan(grpo(np.array([3.0, np.nan, 2.0]), groups, epsilon=0.0)[1:]))


gdpo = jitted.gdpo_advantages


@pytest.mark.slow
def test_gdpo_keeps_apart_what_a_sum_confuses():
    rewards = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    groups = np.zeros(4, int)
    plain = gdpo(rewards, groups)
    np.testing.assert_allclose(gdpo(10.0 * rewards, groups), plain, rtol=1e-4, atol=1e-6)
    heavy = np.asarray(gdpo(rewards, groups, weights=np.array([3.0, 1.0])))
    assert heavy[2] > heavy[0] > heavy[1] > heavy[3]
    np.testing.assert_allclose(gdpo(rewards, groups, lengths=np.ones(4)), plain)


@pytest.mark.parametrize("lengths", [None, [1, 1], [1, 0]])
def test_gdpo_of_two_responses(lengths):
    rewards, groups = np.array([[1.0, 0.0], [0.0, 3.0]]), np.zeros(2, int)
    settings = {"weights": [1.0, 2.0]}
    settings |= {} if lengths is None else {"lengths": np.array(lengths)}
    expected = oracles.gdpo(rewards, groups, **settings)
    settings = {name: np.asarray(value) for name, value in settings.items()}
    actual = gdpo(rewards, groups, **settings)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_gdpo_is_a_constant_in_everything_it_is_given():
    random = np.random.default_rng(4)
    rewards, lengths = random.uniform(1, 3, (4, 2)), random.uniform(1, 3, 4)

    def cubed(rewards, weights, lengths):
        found = jrl.gdpo_advantages(rewards, jnp.zeros(4, int), weights=weights, lengths=lengths)
        return jnp.sum(found**3)

    slope = jax.jit(jax.grad(cubed, argnums=(0, 1, 2)))
    assert not any(np.any(x) for x in slope(rewards, np.array([3.0, 1.0]), lengths))


def test_gpg_divides_by_one_rewarded_response():
    rewards, groups = np.array([1.0, 0.0, 0.0]), np.array([0, 0, 0])
    advantages = jitted.gpg_advantages(rewards, groups, alpha="nonzero")
    np.testing.assert_allclose(advantages, [2.0, -1.0, -1.0], rtol=1e-6)


def test_names_of_groups_have_64_bits():
    names = np.array([1 << 40, 1 << 40, 1 << 41, 1 << 41])
    rewards = np.array([1.0, 0, 3, 1], np.float32)
    expected = [0.5, -0.5, 1, -1]
    assert jrl.dr_grpo_advantages(rewards, names).tolist() == expected
    assert jrl.informative_groups(rewards, np.array([-1, -1, 2**32 - 1, -1])).tolist()[2] is False
