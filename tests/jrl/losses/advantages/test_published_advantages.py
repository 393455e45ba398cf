"""Advantage estimators on worked examples, the numbers written out to six decimals."""

import numpy as np
import pytest
from compiled import jitted

# ADV-1: two groups of four, with the lengths of the responses.
SCORES = np.array([1.0, 0, 0, 1, 1, 0, 0, 0])
GROUPS = np.array([0, 0, 0, 0, 1, 1, 1, 1])
LENGTHS = np.array([4, 2, 6, 8, 3, 3, 6, 4])
MASK = np.arange(8)[None] < LENGTHS[:, None]
LAST = np.where(np.arange(8)[None] == LENGTHS[:, None] - 1, SCORES[:, None], 0)


def two_groups(half, right, wrong):
    """Values of ADV-1 from that of the even group and the two of the other."""
    return [half, -half, -half, half, right, wrong, wrong, wrong]


ADV_1 = {
    "grpo": (
        lambda: jitted.grpo_advantages(SCORES, GROUPS),
        two_groups(0.866024, 1.499997, -0.499999),
    ),
    "grpo, population": (
        lambda: jitted.grpo_advantages(SCORES, GROUPS, unbiased=False),
        two_groups(0.999998, 1.732047, -0.577349),
    ),
    "dr_grpo": (lambda: jitted.dr_grpo_advantages(SCORES, GROUPS), two_groups(0.5, 0.75, -0.25)),
    "rloo": (lambda: jitted.rloo_advantages(SCORES, GROUPS), two_groups(0.666667, 1, -0.333333)),
    "gpg, nonzero": (
        lambda: jitted.gpg_advantages(SCORES, GROUPS, alpha="nonzero"),
        two_groups(1.333333, 2, -0.666667),
    ),
    "gpg, informative": (
        lambda: jitted.gpg_advantages(SCORES, GROUPS),
        two_groups(0.5, 0.75, -0.25),
    ),
    "opo": (
        lambda: jitted.opo_advantages(SCORES, GROUPS, LENGTHS),
        [0.4, -0.6, -0.6, 0.4, 0.8125, -0.1875, -0.1875, -0.1875],
    ),
    "grpo, batch": (
        lambda: jitted.grpo_advantages(SCORES, GROUPS, scale="batch", epsilon=1e-4),
        two_groups(0.965905, 1.448858, -0.482953),
    ),
    "maxrl": (lambda: jitted.maxrl_advantages(SCORES, GROUPS), two_groups(1, 3, -1)),
    "pass_at_k": (
        lambda: jitted.pass_at_k_advantages(SCORES, GROUPS),
        [0, 0, 0, 0, 1.999996, 0, 0, 0],
    ),
}
ADV_1_TOKENS = {
    "reinforce_plus_plus": (
        lambda: jitted.reinforce_plus_plus_advantages(LAST, MASK),
        [1.166667, -0.833333, -0.833333, 1.166667, 1.166667, -0.833333, -0.833333, -0.833333],
    ),
    "reinforce_plus_plus_baseline": (
        lambda: jitted.reinforce_plus_plus_baseline_advantages(SCORES, GROUPS, MASK),
        [1.022011, -1.142248, -1.142248, 1.022011, 1.563076, -0.601183, -0.601183, -0.601183],
    ),
    "HAPO-3": (
        lambda: jitted.token_level_group_average(SCORES, GROUPS, MASK),
        [0.816495, -1.224742, -1.224742, 0.816495, 2.081661, -0.480383, -0.480383, -0.480383],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("call", "expected"), ADV_1.values(), ids=ADV_1.keys())
def test_adv_1(call, expected):
    np.testing.assert_allclose(call(), expected, atol=1.5e-6)


@pytest.mark.parametrize(("call", "expected"), ADV_1_TOKENS.values(), ids=ADV_1_TOKENS.keys())
def test_adv_1_of_every_token(call, expected):
    expected = np.where(MASK, np.array(expected)[:, None], 0)
    np.testing.assert_allclose(call(), expected, atol=1.5e-6)


VALUES = [0.1, 0.3, 0.2, 0.5, 0.4]
EGAE = {
    "1 unfinished": (VALUES, True, {}, [0.290013, 0.09475, 0.205, -0.1, 0]),
    "1 last 2 ignored": (VALUES, True, {"ignore_last": 2}, [0.290013, 0.09475, 0.205, 0, 0]),
    "1 finished": (VALUES, False, {"ignore_last": 2}, [0.778716, 0.609175, 0.7465, 0.47, 0.6]),
    "1 gamma 0.99": (
        VALUES,
        True,
        {"gamma": 0.99},
        [0.27236, 0.080128, 0.19365, -0.107762, -0.004],
    ),
    "1 lam 1": (VALUES, True, {"lam": 1.0}, [0.3, 0.1, 0.2, -0.1, 0]),
    "2 window 1": (VALUES[:3], True, {}, [0.105, -0.1, 0]),
    "2 window 2": (VALUES[3:], False, {}, [0.47, 0.6]),
    "2 window 1, V(s_3)": (VALUES[:3], True, {"bootstrap_value": 0.5}, [0.37575, 0.185, 0.3]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("values", "cut", "settings", "expected"), EGAE.values(), ids=EGAE.keys())
def test_egae(values, cut, settings, expected):
    rewards = np.zeros(len(values))
    rewards[-1] = 0.0 if cut else 1.0
    mask = np.ones(len(values))
    result = jitted.extended_gae(rewards, np.array(values), mask, np.array(cut), **settings)
    np.testing.assert_allclose(result[0], expected, atol=1e-6)
    # Returns do not hear of what is ignored.
    whole = jitted.extended_gae(
        rewards, np.array(values), mask, np.array(cut), **{**settings, "ignore_last": 0}
    )
    np.testing.assert_allclose(result[1], whole[0] + np.array(values), atol=1e-6)


def test_egae_1_the_cut_taken_for_an_end_is_something_else():
    ended, _ = jitted.gae(np.zeros(5), np.array(VALUES), np.ones(5))
    np.testing.assert_allclose(ended, [-0.03579, -0.2482, -0.156, -0.48, -0.4], atol=1e-6)


def test_egae_3():
    lengths, truncated = np.array([8192, 8192, 16384, 300]), np.array([False, True, True, False])
    effective = jitted.effective_length(lengths, truncated, window=8192)
    assert effective.tolist() == [8192, 12288, 20480, 300]
    lam = jitted.length_adaptive_lambda(effective, floor=0.95)
    np.testing.assert_allclose(lam, [0.997559, 0.998372, 0.999023, 0.95], atol=1e-6)


def test_lambda_2():
    rewards = np.array([[0.0, 0, 0, 1], [0, 0, -1, 0]])
    values = np.array([[0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, 9]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    lam = jitted.length_adaptive_lambda(mask.sum(1), alpha=0.5)
    advantages, returns = jitted.decoupled_gae(rewards, values, mask, lam_policy=lam[:, None])
    expected = [[0.2, 0.2, 0.2, 0.2], [-0.266667, -0.5, -1.2, 0]]
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(returns, [[1, 1, 1, 1], [-1, -1, -1, 0]], atol=1e-6)
