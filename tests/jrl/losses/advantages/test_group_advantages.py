"""Estimators that compare the responses of a group: what they must ignore, and identities."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from compiled import compiled
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
# One that scales, one that does not, and one of tokens; all have vectors.
QUICK = ("grpo", "rloo", "token_level_group_average")
every = pytest.mark.parametrize("name", full_but(CALLS, *QUICK))
SHIFTED = [name for name in CALLS if name not in ("maxrl", "gdpo")]
# Their statistics are of the whole batch, which must be on one device.
WHOLE_BATCH = ("grpo, batch", "gdpo", "gpg", "reinforce_plus_plus_baseline")
UNSCALED = ("dr_grpo", "rloo", "opo", "gpg", "pass_at_k_exact")


def draw(seed):
    """Positive rewards with ties, groups of any names and sizes, rows without a token."""
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", full_but(SHIFTED, *QUICK))
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


@pytest.mark.parametrize("name", full_but(CALLS, *QUICK))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_groups_without_variance_get_exactly_zero(name, size):
    # 0.1 is not a float32: the rounding of a mean of seven of them, over 1e-6, would be visible.
    rewards = np.array([0.1] * size + [0.3] * (ROWS - size), np.float32)
    groups = np.array([4] * size + [9] * (ROWS - size))
    advantages = run(name, rewards, groups, np.ones((ROWS, TIME), int))
    assert advantages.dtype == np.float32 and not np.any(advantages)


@pytest.mark.slow
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
def test_estimators_that_are_one_another(seed):
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
        found = jax.device_get(advantages(values[groups].ravel()))
    for k, each in found.items():
        estimate = (each.reshape(-1, n)[..., None] * scores).mean(1)
        answers, chances_of_k, scores_of_k = draws(k)
        best = values[answers].max(1)
        same(chances @ estimate, (chances_of_k * best) @ scores_of_k.sum(1))


@pytest.mark.slow
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
        found = {}
        for name, estimator in estimators.items():
            result, pull = jax.vjp(estimator, given)
            found[name] = result, pull(jnp.asarray(draw.normal(size=result.shape), jnp.float32))
        return found

    for name, (result, slopes) in results_and_slopes(given).items():
        assert np.any(result), name
        assert not any(np.any(slope) for slope in jax.tree.leaves(slopes)), name


@pytest.mark.parametrize(
    "name", full_but([name for name in CALLS if name not in WHOLE_BATCH], "grpo")
)
def test_groups_that_lie_on_one_device_each(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(3)
    rewards = random.uniform(0.5, 3, 24).astype(np.float32)
    groups, mask = np.repeat(np.arange(8), 3), random.integers(0, 2, (24, TIME))
    arrays = rewards, groups, mask
    rows = jax.sharding.PartitionSpec("data")
    cut = jax.shard_map(CALLS[name], mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
    expected = compiled(CALLS[name])(*arrays)
    np.testing.assert_allclose(jax.jit(cut)(*arrays), expected, rtol=1e-5, atol=1e-6)
