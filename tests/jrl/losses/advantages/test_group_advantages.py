"""Estimators that compare the responses of a group: invariances, identities, edges of each."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from compiled import compiled, jitted
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import full_but

import jrl

ROWS, TIME = 11, 5
few = settings(max_examples=8, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31)

# From rewards, groups and a mask to one number per response or per token.
CALLS = {
    "grpo": lambda r, g, m: jrl.grpo_advantages(r, g, epsilon=1e-3),
    "grpo, population": lambda r, g, m: jrl.grpo_advantages(r, g, unbiased=False),
    "grpo, batch": lambda r, g, m: jrl.grpo_advantages(r, g, scale="batch"),
    "dr_grpo": lambda r, g, m: jrl.dr_grpo_advantages(r, g),
    "rloo": lambda r, g, m: jrl.rloo_advantages(r, g),
    "maxrl": lambda r, g, m: jrl.maxrl_advantages(r, g),
    "opo": lambda r, g, m: jrl.opo_advantages(r, g, m.sum(1)),
    "gpg": lambda r, g, m: jrl.gpg_advantages(r, g),
    "pass_at_k": lambda r, g, m: jrl.pass_at_k_advantages(r, g),
    "pass_at_k_exact": lambda r, g, m: jrl.pass_at_k_exact_advantages(r, g, k=3),
    "gdpo": lambda r, g, m: jrl.gdpo_advantages(jnp.stack([r, r**2], 1), g, lengths=m.sum(1)),
    "token_level_group_average": lambda r, g, m: jrl.token_level_group_average(r, g, m),
    "reinforce_plus_plus_baseline": lambda r, g, m: jrl.reinforce_plus_plus_baseline_advantages(
        r, g, m
    ),
}
# One that scales, one that does not, and one of tokens; all have vectors.
QUICK = ("grpo", "rloo", "token_level_group_average")
every = pytest.mark.parametrize("name", full_but(CALLS, *QUICK))
SHIFTED = [name for name in CALLS if name not in ("maxrl", "gdpo")]
# Their statistics are of the whole batch, which must be on one device.
WHOLE_BATCH = ("grpo, batch", "gdpo", "gpg", "reinforce_plus_plus_baseline")
UNSCALED = ("dr_grpo", "rloo", "opo", "gpg", "pass_at_k_exact")


def draw(seed):
    """Positive rewards with ties, groups of any names and sizes, empty rows."""
    random = np.random.default_rng(seed)
    names = random.integers(-(2**31), 2**31, 4)
    rewards = np.round(random.uniform(0.5, 3, ROWS), 1)
    groups = random.choice(names, ROWS)
    mask = random.integers(0, 2, (ROWS, TIME))
    return rewards, groups, mask


def run(name, rewards, groups, mask):
    return np.asarray(compiled(CALLS[name])(rewards, groups, mask))


def same(actual, expected):
    """Up to the rounding of float64, blown up by at most 1e-6 in a division."""
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@every
@given(seeds)
@few
def test_group_advantages_follow_permutations_and_renamed_groups(name, seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        expected = run(name, rewards, groups, mask)
        order = np.random.default_rng(seed).permutation(ROWS)
        same(run(name, rewards[order], groups[order], mask[order]), expected[order])
        _, renamed = np.unique(groups, return_inverse=True)
        same(run(name, rewards, (7 - 3 * renamed).astype(groups.dtype), mask), expected)


@pytest.mark.parametrize("name", full_but(SHIFTED, *QUICK))
@given(seeds)
@few
def test_group_advantages_ignore_a_constant_per_group(name, seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        _, index = np.unique(groups, return_inverse=True)
        # The deviation of the batch differs from a group's, so there the constant is one for all.
        constant = 5.0 if name == "grpo, batch" else np.array([4.0, -8.0, 16.0, 1.0])[index]
        same(run(name, rewards + constant, groups, mask), run(name, rewards, groups, mask))


@every
@given(seeds)
@few
def test_group_advantages_scale_with_rewards_only_if_unscaled(name, seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        once, twice = run(name, rewards, groups, mask), run(name, 2 * rewards, groups, mask)
        if name in UNSCALED:
            same(twice, 2 * once)
        else:
            np.testing.assert_allclose(twice, once, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", full_but(CALLS, *QUICK))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_group_advantages_of_equal_rewards_are_exactly_zero(name, size):
    # 0.1 is not a float32: the rounding of a mean of seven of them, over 1e-6, would be visible.
    rewards = np.array([0.1] * size + [0.3] * (ROWS - size), np.float32)
    groups = np.array([4] * size + [9] * (ROWS - size))
    advantages = run(name, rewards, groups, np.ones((ROWS, TIME), int))
    assert advantages.dtype == np.float32 and not np.any(advantages)


@pytest.mark.slow
@given(seeds)
@few
def test_group_advantages_sum_to_zero(seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        tokens = mask.sum(1)
        for group in np.unique(groups):
            rows = groups == group
            for name in ("grpo", "dr_grpo", "rloo", "maxrl", "gpg"):
                same(run(name, rewards, groups, mask)[rows].sum(), 0)
            same((tokens * run("opo", rewards, groups, mask))[rows].sum(), 0)
            same(run("token_level_group_average", rewards, groups, mask)[rows].sum(), 0)


@jax.jit
def others(rewards, groups):
    """Estimators with settings that make them one another."""
    return (
        jrl.gpg_advantages(rewards, groups, alpha=1),
        jrl.grpo_advantages(rewards, groups, scale=None),
        jrl.gdpo_advantages(rewards[:, None], groups, whitened=False),
        jrl.grpo_advantages(rewards, groups),
    )


@pytest.mark.slow
@given(seeds)
@few
def test_group_estimators_coincide_in_special_cases(seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        plain = run("dr_grpo", rewards, groups, mask)
        size = np.array([np.sum(groups == g) for g in groups])
        same(run("rloo", rewards, groups, mask), plain * size / np.maximum(size - 1, 1))
        same(run("opo", rewards, groups, np.ones_like(mask)), plain)
        gpg, grpo, once, scaled = others(rewards, groups)
        same(gpg, plain)
        same(grpo, plain)
        same(once, scaled)
        # With responses of one length, tokens are responses: only the deviation is another.
        tokens = run("token_level_group_average", rewards, groups, np.ones_like(mask))
        same(tokens[:, 0], run("grpo, population", rewards, groups, mask))


@pytest.mark.slow
def test_pass_at_k_exact_is_the_gradient_of_the_best_of_k():
    # A policy over three answers with rewards of their own; all groups of four, each with its
    # probability: the expectation of A grad log p is the gradient of E max of k.
    values, logits, n = np.array([0.0, 1.0, 3.0]), np.array([0.2, -0.5, 0.4]), 4
    p = np.exp(logits) / np.exp(logits).sum()

    def draws(size):
        """All choices of so many answers, their chances, and the gradients of the logarithms."""
        answers = np.array(list(itertools.product(range(3), repeat=size)))
        return answers, p[answers].prod(1), np.eye(3)[answers] - p

    groups, chances, scores = draws(n)
    names = np.repeat(np.arange(len(groups)), n)

    @jax.jit
    def advantages(rewards):
        return {k: jrl.pass_at_k_exact_advantages(rewards, names, k=k) for k in (2, 3, 4)}

    with jax.enable_x64(True):
        result = jax.device_get(advantages(values[groups].ravel()))
    for k, each in result.items():
        estimate = (each.reshape(-1, n)[..., None] * scores).mean(1)
        answers, chances_of_k, scores_of_k = draws(k)
        best = values[answers].max(1)
        same(chances @ estimate, (chances_of_k * best) @ scores_of_k.sum(1))


@pytest.mark.slow
def test_pass_at_k_exact_with_k_of_the_group_size():
    rewards = jnp.array([1.0, 4.0, 2.5, 0.0, 3.0, 3.0, 1.0, 0.0])
    groups = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])

    @jax.jit
    def found(*given):
        exact = {k: jrl.pass_at_k_exact_advantages(*given, k=k) for k in (4, 5)}
        return exact, jrl.pass_at_k_advantages(*given, scale=None)

    exact, plain = found(rewards, groups)
    np.testing.assert_allclose(exact[4], 4 * plain, rtol=1e-6)
    assert not np.any(exact[5])


@pytest.mark.slow
def test_advantages_have_no_gradient():
    draw = np.random.default_rng(0)
    mask = jnp.asarray(np.arange(6)[None] < draw.integers(1, 7, (8, 1)))
    groups, lengths = jnp.asarray([0, 0, 0, 0, 3, 3, 3, 3]), mask.sum(-1).astype(float)
    given = {
        "scores": jnp.asarray(draw.uniform(1, 2, 8), jnp.float32),
        "lengths": lengths,
        "per_token": jnp.asarray(draw.normal(size=(8, 6)), jnp.float32),
        "weights": jnp.asarray(draw.uniform(1, 2, 8), jnp.float32),
    }
    estimators = {
        "grpo": lambda g: jrl.grpo_advantages(g["scores"], groups),
        "grpo, batch": lambda g: jrl.grpo_advantages(g["scores"], groups, scale="batch"),
        "dr_grpo": lambda g: jrl.dr_grpo_advantages(g["scores"], groups),
        "rloo": lambda g: jrl.rloo_advantages(g["scores"], groups),
        "maxrl": lambda g: jrl.maxrl_advantages(g["scores"], groups),
        "opo": lambda g: jrl.opo_advantages(g["scores"], groups, g["lengths"]),
        "gpg": lambda g: jrl.gpg_advantages(g["scores"], groups),
        "pass_at_k": lambda g: jrl.pass_at_k_advantages(g["scores"], groups),
        "pass_at_k_exact": lambda g: jrl.pass_at_k_exact_advantages(g["scores"], groups, k=2),
        "gdpo": lambda g: jrl.gdpo_advantages(
            jnp.stack([g["scores"], g["scores"] ** 2], -1), groups, weights=g["weights"][:2]
        ),
        "token_level_group_average": lambda g: jrl.token_level_group_average(
            g["scores"], groups, mask
        ),
        "reinforce_plus_plus": lambda g: jrl.reinforce_plus_plus_advantages(g["per_token"], mask),
        "reinforce_plus_plus_baseline": lambda g: jrl.reinforce_plus_plus_baseline_advantages(
            g["scores"], groups, mask
        ),
        "remax": lambda g: jrl.remax_advantages(g["per_token"], g["scores"], mask),
        "optimal_token_baseline": lambda g: jrl.optimal_token_baseline(
            g["per_token"],
            groups,
            -jnp.abs(g["per_token"]),
            jnp.exp(-(g["per_token"] ** 2)),
            mask,
            importance_weights=jnp.exp(g["per_token"]),
        ),
    }

    @jax.jit
    def results_and_slopes(given):
        actual = {}
        for name, estimator in estimators.items():
            result, pull = jax.vjp(estimator, given)
            actual[name] = result, pull(jnp.asarray(draw.normal(size=result.shape), jnp.float32))
        return actual

    for name, (result, slopes) in results_and_slopes(given).items():
        assert np.any(result), name
        assert not any(np.any(slope) for slope in jax.tree.leaves(slopes)), name


@pytest.mark.parametrize(
    "name", full_but([name for name in CALLS if name not in WHOLE_BATCH], "grpo")
)
def test_group_advantages_with_one_group_per_device(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(3)
    rewards = random.uniform(0.5, 3, 24).astype(np.float32)
    groups, mask = np.repeat(np.arange(8), 3), random.integers(0, 2, (24, TIME))
    arrays = rewards, groups, mask
    rows = jax.sharding.PartitionSpec("data")
    cut = jax.shard_map(CALLS[name], mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    expected = compiled(CALLS[name])(*arrays)
    np.testing.assert_allclose(jax.jit(cut)(*arrays), expected, rtol=1e-5, atol=1e-6)


def test_maxrl_averages_the_score_over_successes():
    rewards = np.array([1.0, 0, 0, 1, 0, 0, 0, 0])
    advantages = jitted.maxrl_advantages(rewards, np.zeros(8, int))
    score = np.arange(8.0) ** 2
    centred = score - score.mean()
    np.testing.assert_allclose((advantages * score).mean(), centred[[0, 3]].mean(), rtol=1e-6)


def test_maxrl_flips_sign_for_a_negative_mean():
    result = jitted.maxrl_advantages(np.array([-1.0, -3.0]), np.array([0, 0]))
    assert result.tolist() == [-0.5, 0.5]


average = jax.jit(jrl.token_level_group_average)

grpo = jitted.grpo_advantages


@pytest.mark.slow
def test_token_level_average_falls_back_by_group_above_its_bound():
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
def test_token_level_average_falls_back_below_the_mean():
    # The other two rows are another group, which nothing befalls.
    mask = np.arange(9)[None] < np.array([1, 9, 9, 9, 9, 1, 1])[:, None]
    rewards, groups = np.array([0.0, 1, 1, 1, 1, 0, 0]), np.array([0, 0, 0, 0, 0, 1, 1])
    tokens = np.asarray(average(rewards, groups, mask, epsilon=0.0))
    lowest = float(tokens[0, 0])
    np.testing.assert_allclose(lowest, -6, rtol=1e-6)
    plain = np.where(mask, np.asarray(grpo(rewards, groups))[:, None], 0)
    for fallback, expected in ((-lowest, plain), (-lowest * 1.001, tokens)):
        actual = average(rewards, groups, mask, epsilon=0.0, fallback=fallback)
        np.testing.assert_array_equal(actual, expected)


def test_token_level_average_ignores_empty_responses():
    mask = np.array([[1, 1], [1, 0], [0, 0]])
    rewards, groups = np.array([1.0, 0.0, -100.0]), np.array([0, 0, 0])
    with_it = average(rewards, groups, mask)
    without = average(*(x[:2] for x in (rewards, groups, mask)))
    np.testing.assert_array_equal(with_it[:2], without)
    assert not np.any(with_it[2])


def test_dr_grpo_keeps_digits_far_from_zero():
    # All of these are numbers of float32, whose spacing at 8192 is 1 / 1024.
    rewards = 8192 + np.array([0.0, 1.0, 2.0, 5.0]) / 1024
    centred = jitted.dr_grpo_advantages(rewards, np.zeros(4, np.int32))
    np.testing.assert_array_equal(centred, np.array([-2, -1, 0, 3]) / 1024)


def test_grpo_of_singletons_without_epsilon():
    rewards, groups = np.array([3.0, 1.0, 2.0]), np.array([5, 6, 6])
    assert grpo(rewards, groups, scale=None, singleton="reward").tolist() == [3, -0.5, 0.5]
    with_epsilon = grpo(rewards, groups, singleton="reward", epsilon=1.0)
    assert with_epsilon[0] == 1.5
    assert grpo(rewards, groups, epsilon=0.0)[0] == 0
    assert np.all(np.isnan(grpo(np.array([3.0, np.nan, 2.0]), groups, epsilon=0.0)[1:]))


gdpo = jitted.gdpo_advantages


@pytest.mark.slow
def test_gdpo_separates_rewards_with_equal_sums():
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


def test_gdpo_has_no_gradient():
    random = np.random.default_rng(4)
    rewards, lengths = random.uniform(1, 3, (4, 2)), random.uniform(1, 3, 4)

    def cubed(rewards, weights, lengths):
        result = jrl.gdpo_advantages(rewards, jnp.zeros(4, int), weights=weights, lengths=lengths)
        return jnp.sum(result**3)

    slope = jax.jit(jax.grad(cubed, argnums=(0, 1, 2)))
    assert not any(np.any(x) for x in slope(rewards, np.array([3.0, 1.0]), lengths))


def test_gpg_divides_by_one_rewarded_response():
    rewards, groups = np.array([1.0, 0.0, 0.0]), np.array([0, 0, 0])
    advantages = jitted.gpg_advantages(rewards, groups, alpha="nonzero")
    np.testing.assert_allclose(advantages, [2.0, -1.0, -1.0], rtol=1e-6)


def test_group_names_have_64_bits():
    names = np.array([1 << 40, 1 << 40, 1 << 41, 1 << 41])
    rewards = np.array([1.0, 0, 3, 1], np.float32)
    expected = [0.5, -0.5, 1, -1]
    assert jrl.dr_grpo_advantages(rewards, names).tolist() == expected
    assert jrl.informative_groups(rewards, np.array([-1, -1, 2**32 - 1, -1])).tolist()[2] is False


def test_grpo_accepts_integer_rewards():
    rewards, groups = np.array([1, 0, 0, 1]), np.zeros(4, int)
    np.testing.assert_allclose(grpo(rewards, groups), grpo(rewards.astype(float), groups))
