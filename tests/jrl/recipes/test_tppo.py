"""T-PPO: what a window teaches the policy, and what a finished response teaches the critic."""

import functools

import jax
import numpy as np
import oracles
import pytest

from jrl.recipes import Batch, Tppo
from jrl.recipes.base.recipe import Windows

PROMPT, TIME = 2, 9
VALUES = [0.1, 0.3, 0.2, 0.5, 0.4]
PLAIN = {"whiten_advantages": False, "advantage_clip": None}


def windows(lengths, begins, finished, rewards, values=None, **given):
    """Rows whose window begins at a token of the response."""
    time, lengths = np.arange(TIME)[None, :], np.asarray(lengths)
    if values is None:
        values = np.random.default_rng(0).normal(size=(len(lengths), TIME))
    valid = time < PROMPT + lengths[:, None]
    arrays = {
        "tokens": np.zeros(valid.shape, np.int32),
        "valid": valid,
        "mask": valid & (time >= PROMPT + np.asarray(begins)[:, None]),
        "finished": np.asarray(finished, bool),
        "lengths": lengths.astype(np.int32),
        "rewards": np.asarray(rewards, np.float32),
        "old_values": np.asarray(values, np.float32),
        **given,
    }
    return Batch(**arrays)


def row(begin, length, finished, reward=0.0):
    values = np.full((1, TIME), 9.0)
    values[0, PROMPT : PROMPT + len(VALUES)] = VALUES
    return windows([length], [begin], [finished], [reward], values)


@functools.partial(jax.jit, static_argnums=0)
def targets_of(recipe, given):
    return recipe.targets(given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        ({}, (0, 5, False), [0.290013, 0.09475, 0.205, -0.1, 0]),
        ({"ignore_last": 2}, (0, 5, False), [0.290013, 0.09475, 0.205, 0, 0]),
        ({}, (0, 5, True, 1.0), [0.778716, 0.609175, 0.7465, 0.47, 0.6]),
        ({"ignore_last": 2}, (0, 5, True, 1.0), [0.778716, 0.609175, 0.7465, 0.47, 0.6]),
        ({"gamma": 0.99}, (0, 5, False), [0.27236, 0.080128, 0.19365, -0.107762, -0.004]),
        ({"lam_floor": 1.0}, (0, 5, False), [0.3, 0.1, 0.2, -0.1, 0]),
        # The same response in two windows.
        ({}, (0, 3, False), [0.105, -0.1, 0, 0, 0]),
        ({}, (3, 5, True, 1.0), [0, 0, 0, 0.47, 0.6]),
    ],
)
def test_advantages_of_the_reference_table(settings, given, expected):
    recipe = Tppo(**{"window": 8, "ignore_last": 0, **PLAIN, **settings})
    advantages = targets_of(recipe, row(*given)).advantages[0]
    # The table has six decimals.
    np.testing.assert_allclose(advantages[PROMPT : PROMPT + 5], expected, atol=1e-6)
    np.testing.assert_array_equal(np.delete(advantages, np.s_[PROMPT : PROMPT + 5]), 0)


@pytest.mark.parametrize(
    ("length", "finished", "lam"),
    [(8192, True, 0.997559), (8192, False, 0.998372), (16384, False, 0.999023), (300, True, 0.95)],
)
def test_lambda_is_that_of_the_length_expected(length, finished, lam):
    """With a window of 8192 tokens, of which the five here are the last."""
    given = row(0, 5, finished).replace(lengths=np.array([length], np.int32))
    recipe = Tppo(window=8192, ignore_last=0, **PLAIN)
    values, rewards = np.zeros((1, TIME)), np.zeros((1, TIME))
    values[0, PROMPT : PROMPT + 5] = VALUES
    # The value after the last token: as before it, or none.
    rewards[0, PROMPT + 4] = 0 if finished else VALUES[-1]
    expected, _ = oracles.gae(rewards, values, given.mask, 1.0, np.array([[lam]]))
    # lam has six decimals, and four of them are multiplied at most.
    np.testing.assert_allclose(targets_of(recipe, given).advantages, expected, atol=4e-6)
    if finished:
        found = jax.jit(recipe.policy_lambda)(np.array([length]))
        np.testing.assert_allclose(found, [[lam]], atol=1e-6)


def test_masks():
    """The policy has the window without its unfinished end, the critic whole finished responses."""
    given = windows([7, 7, 6, 2], [4, 0, 4, 0], [True, False, False, True], [1, 0, 0, -1])
    targets = targets_of(Tppo(window=8, ignore_last=5), given)
    policy, critic = np.asarray(targets.mask), np.asarray(targets.critic_mask)
    found = [np.flatnonzero(own[PROMPT:]).tolist() for own in policy]
    # A quarter of the window is left out at most.
    assert found == [[4, 5, 6], [0, 1, 2, 3, 4], [], [0, 1]]
    found = [np.flatnonzero(own[PROMPT:]).tolist() for own in critic]
    assert found == [[0, 1, 2, 3, 4, 5, 6], [], [], [0, 1]]
    assert not policy[:, :PROMPT].any() and not critic[:, :PROMPT].any()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_critic_learns_from_monte_carlo_returns(gamma):
    """Of all windows, whatever the critic said."""
    given = windows([7, 5, 2], [4, 4, 0], [True, False, True], [1.0, 0.0, -1.0])
    targets = targets_of(Tppo(window=4, gamma=gamma), given)
    for number, length, reward in ((0, 7, 1.0), (2, 2, -1.0)):
        expected = reward * gamma ** np.arange(length)[::-1]
        found = targets.returns[number, PROMPT : PROMPT + length]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # float32


@pytest.mark.slow
def test_advantages_are_whitened_over_what_is_kept_and_then_bounded():
    given = windows([7, 7, 6, 2], [4, 0, 3, 0], [True, False, False, True], [1, 0, 0, -1])
    plain = targets_of(Tppo(window=4, **PLAIN), given)
    kept = np.asarray(plain.mask)
    assert (np.asarray(given.mask) & ~kept).any()
    whitened = oracles.whiten(np.asarray(plain.advantages, np.float64), kept)
    for bound in (None, 0.8):
        recipe = Tppo(window=4, whiten_advantages=True, advantage_clip=bound)
        expected = whitened if bound is None else np.clip(whitened, -bound, bound)
        # float32 against float64.
        np.testing.assert_allclose(
            targets_of(recipe, given).advantages, expected, rtol=1e-4, atol=1e-6
        )
    assert np.abs(whitened).max() > 0.8
    assert Tppo().advantage_clip == 10


def test_the_ratio_is_that_of_the_probabilities():
    """At advantages whose clip does not act."""
    moved = np.array([-0.3, -0.1, 0.0, 0.1, 0.3], np.float32)
    given = row(0, 5, True)
    columns = np.s_[:, PROMPT : PROMPT + 5]
    logprobs, old, advantages = (np.zeros((1, TIME), np.float32) for _ in range(3))
    logprobs[columns], old[columns] = moved - 2, -2
    advantages[columns] = np.where(moved < 0, 1, -1)
    given = given.replace(old_logprobs=np.asarray(old), advantages=np.asarray(advantages))
    arrays = np.asarray(logprobs), np.zeros((1, TIME), np.float32), given, None
    losses, _ = jax.jit(Tppo().surrogate)(*arrays)
    expected = [-0.740818, -0.904837, 1.0, 1.105171, 1.349859]
    np.testing.assert_allclose(losses[columns][0], expected, atol=1e-6)  # six decimals


def test_without_windows_every_response_is_finished():
    given = windows([7, 5], [0, 0], [True, True], [1, -1])
    expected = targets_of(Tppo(window=4), given)
    found = targets_of(Tppo(window=4), given.replace(finished=None))
    for name in ("advantages", "returns", "mask", "critic_mask"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_what_is_collected():
    assert Tppo(window=5).collection == Tppo(window=5).fitted(99).collection == Windows(5)
    assert Tppo().fitted(12).collection == Windows(9)
    assert not Tppo().has_complete_groups
    assert Tppo().value_clip_sides == (0.5, 0.6)
    assert Tppo(value_clip=None).value_clip_sides is None
    assert Tppo(value_clip_up=None).value_clip_sides == (0.5, 0.5)


def test_paper():
    recipe = Tppo.paper()
    table = {
        "prompts": 512,
        "group_size": 16,
        "mini_batch": 512,
        "learning_rate": 1e-6,
        "critic_learning_rate": 2e-6,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": None,
        "gamma": 1.0,
        "lam_critic": 1.0,
        "lam_alpha": 0.05,
        "lam_floor": 0.95,
        "ignore_last": 8,
        "num_ignored": 8,
        "positive_coef": 0.1,
        "window": 8192,
    }
    assert {name: getattr(recipe, name) for name in table} == table


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window=0 must be at least 1"),
        ({"ignore_last": -1}, "ignore_last=-1 must not be negative"),
        ({"lam_floor": 1.5}, r"lam_floor=1\.5 must lie in 0\.\.1"),
        ({"lam_alpha": 0.0}, r"lam_alpha=0\.0 must be positive"),
        ({"advantage_clip": 0.0}, r"advantage_clip=0\.0 must be positive"),
        ({"dynamic_sampling": True}, "dynamic_sampling=True needs complete groups"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Tppo(**settings)
