"""Estimators that compare the responses of a group: what they must ignore, and identities."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
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
ORACLES = {
    "grpo": lambda r, g, m: oracles.grpo(r, g, epsilon=1e-3),
    "grpo, population": lambda r, g, m: oracles.grpo(r, g, unbiased=False),
    "grpo, batch": lambda r, g, m: oracles.grpo(r, g, scale="batch"),
    "dr_grpo": lambda r, g, m: oracles.grpo(r, g, scale=None),
    "rloo": lambda r, g, m: oracles.rloo(r, g),
    "maxrl": lambda r, g, m: oracles.maxrl(r, g),
    "opo": lambda r, g, m: oracles.opo(r, g, m.sum(1)),
    "gpg": lambda r, g, m: oracles.gpg(r, g),
    "pass_at_k": lambda r, g, m: oracles.pass_at_k(r, g),
    "pass_at_k_exact": lambda r, g, m: oracles.pass_at_k_exact(r, g, k=3),
    "gdpo": lambda r, g, m: oracles.gdpo(np.stack([r, r**2], 1), g, lengths=m.sum(1)),
    "token_level_group_average": lambda r, g, m: oracles.token_level_group_average(r, g, m),
    "reinforce_plus_plus_baseline": lambda r, g, m: oracles.reinforce_plus_plus_baseline(r, g, m),
}
every = pytest.mark.parametrize("name", CALLS)
SHIFTED = [name for name in CALLS if name not in ("maxrl", "gdpo")]
# Their statistics are of the whole batch, which must be on one device.
WHOLE_BATCH = ("grpo, batch", "gdpo", "gpg", "reinforce_plus_plus_baseline")
UNSCALED = ("dr_grpo", "rloo", "opo", "gpg", "pass_at_k_exact")


@functools.cache
def compiled(name):
    return jax.jit(CALLS[name])


def draw(seed):
    """Positive rewards with ties, groups of any names and sizes, rows without a token."""
    random = np.random.default_rng(seed)
    names = random.integers(-(2**31), 2**31, 4)
    rewards = np.round(random.uniform(0.5, 3, ROWS), 1)
    groups = random.choice(names, ROWS)
    mask = random.integers(0, 2, (ROWS, TIME))
    return rewards, groups, mask


def run(name, rewards, groups, mask):
    return np.asarray(compiled(name)(*(jnp.asarray(x) for x in (rewards, groups, mask))))


def same(actual, expected):
    """Up to the rounding of float64, blown up by at most 1e-6 in a division."""
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


@every
@given(seeds)
@few
def test_a_loop_over_groups_says_the_same(name, seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        np.testing.assert_allclose(
            run(name, rewards, groups, mask),
            ORACLES[name](rewards, groups, mask),
            rtol=1e-10,
            atol=1e-10,
        )


@every
@given(seeds)
@few
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(name, seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        expected = run(name, rewards, groups, mask)
        order = np.random.default_rng(seed).permutation(ROWS)
        same(run(name, rewards[order], groups[order], mask[order]), expected[order])
        _, renamed = np.unique(groups, return_inverse=True)
        same(run(name, rewards, (7 - 3 * renamed).astype(groups.dtype), mask), expected)


@pytest.mark.parametrize("name", SHIFTED)
@given(seeds)
@few
def test_a_constant_added_to_the_rewards_of_a_group_does_not_matter(name, seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        _, index = np.unique(groups, return_inverse=True)
        # The deviation of the batch is not that of a group, so there the constant is one for all.
        constant = 5.0 if name == "grpo, batch" else np.array([4.0, -8.0, 16.0, 1.0])[index]
        same(run(name, rewards + constant, groups, mask), run(name, rewards, groups, mask))


@every
@given(seeds)
@few
def test_the_scale_of_the_rewards(name, seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        once, twice = run(name, rewards, groups, mask), run(name, 2 * rewards, groups, mask)
        if name in UNSCALED:
            same(twice, 2 * once)
        else:
            np.testing.assert_allclose(twice, once, rtol=1e-2, atol=1e-6)


@every
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_groups_without_variance_get_exactly_zero(name, size):
    # 0.1 is not a float32: the rounding of a mean of seven of them, over 1e-6, would be visible.
    rewards = np.array([0.1] * size + [0.3] * (ROWS - size), np.float32)
    groups = np.array([4] * size + [9] * (ROWS - size))
    advantages = run(name, rewards, groups, np.ones((ROWS, TIME), int))
    assert advantages.dtype == np.float32 and not np.any(advantages)


@given(seeds)
@few
def test_sums_that_are_zero(seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        tokens = mask.sum(1)
        for group in np.unique(groups):
            rows = groups == group
            for name in ("grpo", "dr_grpo", "rloo", "maxrl", "gpg"):
                same(run(name, rewards, groups, mask)[rows].sum(), 0)
            same((tokens * run("opo", rewards, groups, mask))[rows].sum(), 0)
            same(run("token_level_group_average", rewards, groups, mask)[rows].sum(), 0)


@given(seeds)
@few
def test_estimators_that_are_one_another(seed):
    with jax.enable_x64(True):
        rewards, groups, mask = draw(seed)
        plain = run("dr_grpo", rewards, groups, mask)
        size = np.array([np.sum(groups == g) for g in groups])
        same(run("rloo", rewards, groups, mask), plain * size / np.maximum(size - 1, 1))
        same(run("opo", rewards, groups, np.ones_like(mask)), plain)
        given = (jnp.asarray(rewards), jnp.asarray(groups))
        same(jrl.gpg_advantages(*given, alpha=1), plain)
        same(jrl.grpo_advantages(*given, scale=None), plain)
        once = jrl.gdpo_advantages(given[0][:, None], given[1], whitened=False)
        same(once, jrl.grpo_advantages(*given))
        # With responses of one length, tokens are responses: only the deviation is another.
        tokens = run("token_level_group_average", rewards, groups, np.ones_like(mask))
        same(tokens[:, 0], run("grpo, population", rewards, groups, mask))


def test_pass_at_k_exact_is_the_gradient_of_the_best_of_k():
    # A policy over three answers with rewards of their own; all groups of four, each with its
    # probability: the expectation of A grad log p is the gradient of E max of k.
    values, logits, n = np.array([0.0, 1.0, 3.0]), np.array([0.2, -0.5, 0.4]), 4
    groups = list(itertools.product(range(3), repeat=n))
    with jax.enable_x64(True):
        answers = jnp.asarray(groups)
        names = jnp.repeat(jnp.arange(len(groups)), n)
        for k in (2, 3, 4):

            def best(logits, k=k):
                p = jax.nn.softmax(logits)
                total = 0.0
                for choice in itertools.product(range(3), repeat=k):
                    chance = 1.0
                    for answer in choice:
                        chance = chance * p[answer]
                    total = total + chance * max(values[a] for a in choice)
                return total

            @jax.jit
            def estimate(logits, k=k):
                advantages = jrl.pass_at_k_exact_advantages(
                    jnp.asarray(values)[answers.ravel()], names, k=k
                )
                p = jax.nn.softmax(logits)
                score = jax.nn.one_hot(answers, 3, dtype=p.dtype) - p[None, None]
                each = jnp.mean(advantages.reshape(-1, n)[..., None] * score, 1)
                return jnp.sum(jnp.prod(p[answers], 1)[:, None] * each, 0)

            same(estimate(jnp.asarray(logits)), jax.jit(jax.grad(best))(jnp.asarray(logits)))


def test_pass_at_k_exact_with_all_of_the_group_is_pass_at_k():
    rewards = jnp.array([1.0, 4.0, 2.5, 0.0, 3.0, 3.0, 1.0, 0.0])
    groups = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])

    @jax.jit
    def found(*given):
        exact = {k: jrl.pass_at_k_exact_advantages(*given, k=k) for k in (4, 5)}
        return exact, jrl.pass_at_k_advantages(*given, scale=None)

    exact, plain = found(rewards, groups)
    np.testing.assert_allclose(exact[4], 4 * plain, rtol=1e-6)
    assert not np.any(exact[5])


def test_maxrl_averages_the_score_function_over_the_successes():
    rewards = jnp.array([1.0, 0, 0, 1, 0, 0, 0, 0])
    advantages = jrl.maxrl_advantages(rewards, jnp.zeros(8, int))
    score = jnp.arange(8.0) ** 2
    centred = score - score.mean()
    np.testing.assert_allclose((advantages * score).mean(), centred[jnp.array([0, 3])].mean())


def test_a_negative_mean_turns_maxrl_around():
    assert jrl.maxrl_advantages(jnp.array([-1.0, -3.0]), jnp.array([0, 0])).tolist() == [-0.5, 0.5]


average = jax.jit(jrl.token_level_group_average, static_argnames=("epsilon", "fallback"))


def test_the_fallback_is_of_whole_groups_and_at_the_bound():
    mask = jnp.arange(9)[None] < jnp.array([1, 9, 9, 9, 9, 1, 1])[:, None]
    rewards, groups = jnp.array([1.0, 0, 0, 0, 0, 1, 0]), jnp.array([0, 0, 0, 0, 0, 1, 1])
    plain = jax.jit(jrl.grpo_advantages)(rewards, groups)
    tokens = average(rewards, groups, mask, epsilon=0.0)
    # 36 tokens against one: exactly 6 deviations above the mean.
    np.testing.assert_allclose(tokens[0, 0], 6, rtol=1e-6)
    above = average(rewards, groups, mask, epsilon=0.0, fallback=6.1)
    np.testing.assert_array_equal(above, tokens)
    below = average(rewards, groups, mask, epsilon=0.0, fallback=5.9)
    np.testing.assert_array_equal(below[:5], np.where(mask, plain[:, None], 0)[:5])
    np.testing.assert_array_equal(below[5:], tokens[5:])


def test_the_fallback_looks_at_what_is_below_too_and_its_bound_belongs_to_it():
    mask = jnp.arange(9)[None] < jnp.array([1, 9, 9, 9, 9])[:, None]
    rewards, groups = jnp.array([0.0, 1, 1, 1, 1]), jnp.zeros(5, int)
    tokens = average(rewards, groups, mask, epsilon=0.0)
    lowest = float(tokens[0, 0])
    np.testing.assert_allclose(lowest, -6, rtol=1e-6)
    plain = np.where(mask, jax.jit(jrl.grpo_advantages)(rewards, groups)[:, None], 0)
    for fallback, expected in ((-lowest, plain), (-lowest * 1.001, tokens)):
        found = average(rewards, groups, mask, epsilon=0.0, fallback=fallback)
        np.testing.assert_array_equal(found, expected)


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
    for name, estimator in estimators.items():
        result = jax.jit(estimator)(given)
        factors = jnp.asarray(draw.normal(size=result.shape), jnp.float32)
        assert np.any(result), name
        slopes = jax.jit(jax.grad(lambda g, of=estimator, f=factors: jnp.sum(f * of(g))))(given)
        assert not any(np.any(slope) for slope in jax.tree.leaves(slopes)), name


def test_a_response_without_tokens_does_not_count_among_the_tokens():
    mask = jnp.array([[1, 1], [1, 0], [0, 0]])
    rewards, groups = jnp.array([1.0, 0.0, -100.0]), jnp.array([0, 0, 0])
    with_it = average(rewards, groups, mask)
    without = average(*(np.asarray(x)[:2] for x in (rewards, groups, mask)))
    np.testing.assert_array_equal(with_it[:2], without)
    assert not np.any(with_it[2])


def test_rewards_far_from_zero_keep_their_digits():
    # All of these are numbers of float32, whose spacing at 8192 is 1 / 1024.
    rewards = 8192 + jnp.array([0.0, 1.0, 2.0, 5.0]) / 1024
    centred = jrl.dr_grpo_advantages(rewards, jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(centred, np.array([-2, -1, 0, 3]) / 1024)


def test_singletons_and_no_epsilon():
    rewards, groups = jnp.array([3.0, 1.0, 2.0]), jnp.array([5, 6, 6])
    assert jrl.grpo_advantages(rewards, groups, scale=None, singleton="reward").tolist() == [
        3,
        -0.5,
        0.5,
    ]
    with_epsilon = jrl.grpo_advantages(rewards, groups, singleton="reward", epsilon=1.0)
    assert with_epsilon[0] == 1.5
    assert jrl.grpo_advantages(rewards, groups, epsilon=0.0)[0] == 0
    assert np.all(np.isnan(jrl.grpo_advantages(rewards.at[1].set(jnp.nan), groups)[1:]))


def test_gdpo_keeps_apart_what_a_sum_confuses():
    rewards, groups = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]), jnp.zeros(4, int)
    np.testing.assert_allclose(
        jrl.gdpo_advantages(10.0 * rewards, groups),
        jrl.gdpo_advantages(rewards, groups),
        rtol=1e-4,
        atol=1e-6,
    )
    heavy = jrl.gdpo_advantages(rewards, groups, weights=jnp.array([3.0, 1.0]))
    assert heavy[2] > heavy[0] > heavy[1] > heavy[3]
    np.testing.assert_allclose(
        jrl.gdpo_advantages(rewards, groups, lengths=jnp.ones(4)),
        jrl.gdpo_advantages(rewards, groups),
    )


@pytest.mark.parametrize("lengths", [None, [1, 1], [1, 0]])
def test_gdpo_of_two_responses(lengths):
    rewards, groups = np.array([[1.0, 0.0], [0.0, 3.0]]), np.zeros(2, int)
    settings = {"weights": [1.0, 2.0]}
    settings |= {} if lengths is None else {"lengths": np.array(lengths)}
    expected = oracles.gdpo(rewards, groups, **settings)
    settings = {name: jnp.asarray(value) for name, value in settings.items()}
    actual = jrl.gdpo_advantages(jnp.asarray(rewards), jnp.asarray(groups), **settings)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_gdpo_is_a_constant_in_everything_it_is_given():
    random = np.random.default_rng(4)
    rewards, lengths = (jnp.asarray(random.uniform(1, 3, shape)) for shape in ((4, 2), 4))

    def squared(rewards, weights, lengths):
        return jnp.sum(
            jrl.gdpo_advantages(rewards, jnp.zeros(4, int), weights=weights, lengths=lengths) ** 3
        )

    slopes = jax.grad(squared, argnums=(0, 1, 2))(rewards, jnp.array([3.0, 1.0]), lengths)
    assert not any(np.any(slope) for slope in slopes)


@pytest.mark.parametrize(
    "name", full_but([name for name in CALLS if name not in WHOLE_BATCH], "grpo")
)
def test_groups_that_lie_on_one_device_each(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(3)
    rewards = random.uniform(0.5, 3, 24).astype(np.float32)
    groups, mask = np.repeat(np.arange(8), 3), random.integers(0, 2, (24, TIME))
    arrays = tuple(jnp.asarray(x) for x in (rewards, groups, mask))
    rows = jax.sharding.PartitionSpec("data")
    cut = jax.shard_map(CALLS[name], mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    np.testing.assert_allclose(jax.jit(cut)(*arrays), CALLS[name](*arrays), rtol=1e-5, atol=1e-6)


def test_gpg_divides_by_one_rewarded_response():
    advantages = jrl.gpg_advantages(
        jnp.array([1.0, 0.0, 0.0]), jnp.array([0, 0, 0]), alpha="nonzero"
    )
    np.testing.assert_allclose(advantages, [2.0, -1.0, -1.0], rtol=1e-6)
