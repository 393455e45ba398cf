"""From rewards to advantages and returns, against slow oracles and numbers worked out by hand."""

import functools

import jax
import numpy as np
import oracles
import pytest
from tiers import full_but

from jrl.recipes import (
    Batch,
    Dapo,
    DrGrpo,
    Grpo,
    Maxrl,
    Ppo,
    ReinforcePlusPlus,
    Rloo,
    Vapo,
)
from jrl.recipes.base.batch import terminal_rewards

PROMPT, TIME = 3, 10
LENGTHS = np.array([4, 2, 6, 7, 3, 1])
GROUPS = np.array([5, 5, 5, 2, 2, 2], np.int32)
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.25], np.float32)


def completions(rewards=REWARDS, lengths=LENGTHS, groups=GROUPS, **given):
    """Rows with `PROMPT` columns of prompt; what lies under the mask is never zero."""
    random = np.random.default_rng(0)
    shape = (len(lengths), TIME)
    time = np.arange(TIME)[None, :]
    arrays = {
        "mask": (time >= PROMPT) & (time < PROMPT + lengths[:, None]),
        "rewards": rewards,
        "groups": groups,
        "lengths": lengths.astype(np.int32),
        "truncated": lengths == TIME - PROMPT,
        "tokens": np.zeros(shape, np.int32),
        "valid": np.ones(shape, bool),
        "old_values": random.normal(size=shape).astype(np.float32),
        "old_logprobs": -random.random(shape).astype(np.float32),
        "logprobs": {"reference": -random.random(shape).astype(np.float32)},
        **given,
    }
    return Batch(**arrays)


@functools.partial(jax.jit, static_argnums=0)
def targets_of(recipe, given):
    return recipe.targets(given)


def at_end(rewards, mask):
    """Each reward on the last sampled token of its row."""
    out = np.zeros(np.shape(mask))
    for row, times in enumerate(oracles.rows(mask)):
        out[row, times[-1]] = rewards[row]
    return out


def test_terminal_rewards():
    mask = np.array([[0, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], bool)
    rewards = jax.jit(terminal_rewards)(np.array([2.0, -3.0, 5.0, 7.0]), mask)
    expected = [[0, 0, 2, 0, 0], [0, 0, 0, 0, -3], [0, 0, 0, 0, 0], [0, 7, 0, 0, 0]]
    np.testing.assert_array_equal(rewards, expected)


@pytest.mark.parametrize("scaled", [True, False])
def test_grpo(scaled):
    given = completions()
    targets = targets_of(Grpo(scale_by_std=scaled), given)
    per_row = oracles.grpo(REWARDS, GROUPS, scale="group" if scaled else None)
    # float32 against float64.
    np.testing.assert_allclose(
        targets.advantages, per_row[:, None] * np.asarray(given.mask), rtol=1e-5, atol=1e-6
    )
    assert targets.returns is None


@pytest.mark.parametrize("recipe", [Grpo(), Dapo()])
def test_group_advantages_of_the_reference_table(recipe):
    rewards = np.array([1, 0, 0, 1, 1, 0, 0, 0], np.float32)
    lengths = np.array([4, 2, 6, 7, 3, 3, 6, 4])
    groups = np.repeat(np.arange(2, dtype=np.int32), 4)
    given = completions(rewards, lengths, groups)
    advantages = targets_of(recipe, given).advantages
    expected = [0.866024, -0.866024, -0.866024, 0.866024, 1.499997, -0.499999, -0.499999, -0.499999]
    # The table has six decimals.
    np.testing.assert_allclose(advantages[:, PROMPT], expected, atol=1e-6)
    np.testing.assert_array_equal(advantages != 0, given.mask)


@pytest.mark.parametrize("gamma", full_but([1.0, 0.9], 0.9))
@pytest.mark.parametrize("whitened", [True, False])
def test_vapo(gamma, whitened):
    given = completions()
    recipe = Vapo(gamma=gamma, lam_alpha=0.5, whiten_advantages=whitened)
    targets = targets_of(recipe, given)
    advantages, returns = targets.advantages, targets.returns
    rewards = at_end(REWARDS, given.mask)
    lam = [oracles.length_adaptive_lambda(length, 0.5, 0.0) for length in LENGTHS]
    assert min(lam) == 0 and len(set(lam)) == 5  # the rows differ, and the floor acts
    expected, _ = oracles.gae(rewards, given.old_values, given.mask, gamma, np.array(lam)[:, None])
    if whitened:
        expected = oracles.whiten(expected, given.mask)
    # float32 against float64.
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    # Monte-Carlo: the discounted reward, whatever the critic said.
    for row, times in enumerate(oracles.rows(given.mask)):
        for t in times:
            discounted = gamma ** (times[-1] - t) * REWARDS[row]
            np.testing.assert_allclose(returns[row, t], discounted, rtol=1e-5, atol=1e-6)


def test_vapo_with_one_lambda_for_all():
    given = completions()
    targets = targets_of(Vapo(lam_alpha=None, lam=0.7, whiten_advantages=False), given)
    rewards = at_end(REWARDS, given.mask)
    expected, _ = oracles.gae(rewards, given.old_values, given.mask, 1.0, 0.7)
    # float32 against float64.
    np.testing.assert_allclose(targets.advantages, expected, rtol=1e-5, atol=1e-6)


def test_vapo_by_hand():
    """Two rows of 4 and 3 tokens with alpha = 0.5: lam is 1/2 and 1/3."""
    values = np.zeros((2, TIME), np.float32)
    values[0, PROMPT : PROMPT + 4] = [0.5, 0.6, 0.7, 0.8]
    values[1, PROMPT : PROMPT + 3] = [0.1, 0.0, 0.2]
    given = completions(
        np.array([1.0, -1.0], np.float32),
        np.array([4, 3]),
        np.zeros(2, np.int32),
        old_values=values,
        truncated=np.zeros(2, bool),
    )
    recipe = Vapo(lam_alpha=0.5, whiten_advantages=False)
    targets = targets_of(recipe, given)
    advantages, returns = targets.advantages, targets.returns
    # Errors of the first row are 0.1, 0.1, 0.1, 0.2; of the second -0.1, 0.2, -1.2.
    first = [0.2, 0.2, 0.2, 0.2]
    second = [-1 / 6, -0.2, -1.2]
    np.testing.assert_allclose(advantages[0, PROMPT : PROMPT + 4], first, atol=1e-6)
    np.testing.assert_allclose(advantages[1, PROMPT : PROMPT + 3], second, atol=1e-6)
    np.testing.assert_allclose(returns[0, PROMPT : PROMPT + 4], 1.0, atol=1e-6)
    np.testing.assert_allclose(returns[1, PROMPT : PROMPT + 3], -1.0, atol=1e-6)


@pytest.mark.parametrize("kl", full_but([None, 0.0, 0.5], None, 0.5))
@pytest.mark.parametrize("whitened", full_but([True, False], True))
def test_ppo(kl, whitened):
    given = completions()
    recipe = Ppo(gamma=0.9, lam=0.8, kl_reward_coef=kl, whiten_advantages=whitened)
    targets = targets_of(recipe, given)
    advantages, returns = targets.advantages, targets.returns
    rewards = at_end(REWARDS, given.mask)
    if kl is not None:
        rewards = rewards - kl * np.asarray(given.old_logprobs - given.reference_logprobs)
    expected, targets = oracles.gae(rewards, given.old_values, given.mask, 0.9, 0.8)
    if whitened:
        expected = oracles.whiten(expected, given.mask)
    # float32 against float64.
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, targets, rtol=1e-5, atol=1e-6)


def test_ppo_needs_no_reference_without_its_kl():
    given = completions().replace(logprobs={})
    assert targets_of(Ppo(), given).advantages.shape == (6, TIME)


# A group of three has the mean of the others, (n r - R) / 2, as its leave-one-out baseline.
@pytest.mark.parametrize(
    ("recipe", "formula"),
    [
        (DrGrpo(), lambda rewards: rewards - rewards.mean()),
        (Rloo(), lambda rewards: rewards - (rewards.sum() - rewards) / 2),
        (Maxrl(), lambda rewards: rewards / rewards.mean() - 1),
    ],
)
def test_baselines_of_the_group(recipe, formula):
    given = completions()
    per_row = np.concatenate([formula(REWARDS[:3]), formula(REWARDS[3:])])
    found = targets_of(recipe, given).advantages
    np.testing.assert_allclose(found, per_row[:, None] * np.asarray(given.mask), rtol=1e-6)


@pytest.mark.parametrize("kl", [None, 0.5])
def test_reinforce_plus_plus(kl):
    given = completions()
    rewards = at_end(REWARDS, given.mask)
    if kl is not None:
        rewards = rewards - kl * np.asarray(given.old_logprobs - given.reference_logprobs)
    expected = np.zeros(rewards.shape)
    for row, times in enumerate(oracles.rows(given.mask)):
        to_go = 0.0
        for t in reversed(times):
            to_go = rewards[row, t] + 0.9 * to_go
            expected[row, t] = to_go
    targets = targets_of(ReinforcePlusPlus(gamma=0.9, kl_reward_coef=kl), given)
    whitened = oracles.whiten(expected, given.mask)
    # float32 against float64.
    np.testing.assert_allclose(targets.advantages, whitened, rtol=1e-5, atol=1e-6)
    assert targets.returns is None


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match=r"reward_wrong=-1.0 .* rewards must not be negative"):
        Maxrl(reward_wrong=-1.0)
