"""Diagnostics: gradients, axes, devices, and their values for critics that are known."""

import inspect
import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import MASK, numpy_batch
from compiled import jitted
from tiers import full_but

import jrl
from jrl import diagnostics

ROW_LAM = np.array([0.3, 0.9, 1.0, 0.5, 0.7])
EDGES = (1, 4)


@jax.jit
def everything(b):
    """All diagnostics of a batch in one program."""
    mask, rewards, values, returns = b["mask"], b["rewards"], b["values"], b["returns"]
    lam = jnp.asarray(ROW_LAM)[:, None]
    return {
        "by_position": diagnostics.by_position(values, returns, mask, num_bins=3),
        "calibration": diagnostics.calibration(
            values, b["correct"][:, None], mask, low=-1.0, high=1.0, num_bins=4
        ),
        "bootstrap_bias_bound": diagnostics.bootstrap_bias_bound(
            returns, b["advantages"], mask, 0.6
        ),
        "terminal_reach": diagnostics.terminal_reach(mask, lam=lam, gamma=0.9, threshold=0.2),
        "lambda_sensitivity": diagnostics.lambda_sensitivity(
            rewards, values, mask, lam=0.6, edges=EDGES
        ),
        "guard_rate": diagnostics.guard_rate(
            jnp.sum(mask, axis=1, dtype=jnp.int32), alpha=0.4, floor=0.2
        ),
        "within_between_variance": diagnostics.within_between_variance(b["advantages"], mask),
        "td_concentration": diagnostics.td_concentration(rewards, values, mask, share=0.3),
        "outcome_contradiction": diagnostics.outcome_contradiction(
            rewards, values, b["advantages"], mask
        ),
        "length_share": diagnostics.length_share(mask, edges=EDGES),
        "negative_share": diagnostics.negative_share(b["advantages"], mask),
        "group_degeneracy": diagnostics.group_degeneracy(b["correct"], b["groups"]),
        "bootstrap_bias": diagnostics.bootstrap_bias(returns, mask, 0.6),
        "discounted bootstrap_bias_bound": diagnostics.bootstrap_bias_bound(
            returns, b["advantages"], mask, 0.6, gamma=0.8
        ),
        "discounted td_concentration": diagnostics.td_concentration(
            rewards, values, mask, gamma=0.8, share=0.3
        ),
        "discounted outcome_contradiction": diagnostics.outcome_contradiction(
            rewards, values, b["advantages"], mask, gamma=0.8
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_discounted_diagnostics_equal_the_oracles(seed):
    """The vectors have no discount."""
    b = numpy_batch(seed)
    rewards, values, returns, advantages, mask = (
        b[name] for name in ("rewards", "values", "returns", "advantages", "mask")
    )
    with jax.enable_x64(True):
        actual = jax.device_get(everything(b))
    expected = {
        "bootstrap_bias_bound": oracles.diagnostics.bootstrap_bias_bound(
            returns, advantages, mask, 0.6, 0.8
        ),
        "td_concentration": oracles.diagnostics.td_concentration(rewards, values, mask, 0.3, 0.8),
        "outcome_contradiction": oracles.diagnostics.outcome_contradiction(
            rewards, values, advantages, mask, 0.8
        ),
    }
    for name, numbers in expected.items():
        np.testing.assert_allclose(
            actual[f"discounted {name}"], numbers, 1e-10, 1e-12, err_msg=name
        )


@pytest.mark.slow
def test_diagnostics_have_no_gradient():
    def numbers(b, floats, lam):
        of_lam = (
            diagnostics.bootstrap_bias_bound(b["returns"], b["advantages"], b["mask"], lam),
            diagnostics.terminal_reach(b["mask"], lam=lam, gamma=lam),
            diagnostics.lambda_sensitivity(b["rewards"], b["values"], b["mask"], lam=lam),
        )
        leaves = jax.tree.leaves((everything({**b, **floats}), of_lam))
        return [jnp.sum(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    with jax.enable_x64(True):
        b = numpy_batch(2)
        floats = {name: b[name] for name in ("rewards", "values", "returns", "advantages")}
        floats["correct"] = b["correct"].astype(float)
        assert len(jax.eval_shape(lambda *given: numbers(b, *given), floats, 0.6)) > 30
        slope = jax.jit(jax.grad(lambda *given: sum(numbers(b, *given)), argnums=(0, 1)))
        slopes, of_lam = jax.jit(slope)(floats, 0.6)
    for name, slope in slopes.items():
        assert not np.any(slope), name
    assert of_lam == 0


PER_RESPONSE = {
    "by_position": lambda v, g, a, m: diagnostics.by_position(v, g, m, num_bins=3),
    "calibration": lambda v, g, a, m: diagnostics.calibration(v, g > 0, m, low=-1.0, high=1.0),
    "bootstrap_bias": lambda v, g, a, m: diagnostics.bootstrap_bias(g, m, 0.6).reshape(4, -1),
    "bootstrap_bias_bound": lambda v, g, a, m: diagnostics.bootstrap_bias_bound(g, a, m, 0.6),
    "terminal_reach": lambda v, g, a, m: diagnostics.terminal_reach(m, lam=0.9, threshold=0.2),
    "lambda_sensitivity": lambda v, g, a, m: diagnostics.lambda_sensitivity(
        g, v, m, lam=0.6, edges=EDGES
    ),
    "within_between_variance": lambda v, g, a, m: diagnostics.within_between_variance(a, m),
    "td_concentration": lambda v, g, a, m: diagnostics.td_concentration(g, v, m, share=0.3),
    "outcome_contradiction": lambda v, g, a, m: diagnostics.outcome_contradiction(g, v, a, m),
    "length_share": lambda v, g, a, m: diagnostics.length_share(m, edges=EDGES),
    "negative_share": lambda v, g, a, m: diagnostics.negative_share(a, m),
}


@pytest.mark.parametrize("name", full_but(PER_RESPONSE, "by_position"))
def test_diagnostics_accept_extra_axes(name):
    draw = np.random.default_rng(3)
    arrays = [np.asarray(draw.normal(size=(4, 6)), np.float32) for _ in range(3)]
    arrays.append(draw.random((4, 6)) < 0.7)
    folded = [x.reshape(2, 2, 6) for x in arrays]
    chex.assert_trees_all_close(
        jax.jit(PER_RESPONSE[name])(*folded),
        jax.jit(PER_RESPONSE[name])(*arrays),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("name", diagnostics.__all__)
def test_diagnostics_docstrings_state_concern_and_reading(name):
    thing = getattr(diagnostics, name)
    text = inspect.getdoc(thing) or ""
    if not inspect.isfunction(thing):
        assert all(f"  {field}: " in text for field in typing.get_type_hints(thing))
        return
    assert ">>>" in text and "Returns:" in text
    assert not [p for p in inspect.signature(thing).parameters if f"  {p}: " not in text]
    assert ("**Concern**" in text and "**Reading it.**" in text) or name == "relative_position"


@pytest.mark.slow
def test_diagnostics_on_eight_devices():
    # A batch statistic is one program on arrays cut over devices: the compiler adds the sums.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mask = np.arange(7) < np.random.default_rng(0).integers(0, 8, (16, 1))
    b = {name: np.asarray(x, np.float32) for name, x in numpy_batch(4, mask).items()}
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @jax.jit
    def some(b):
        return (
            diagnostics.by_position(b["values"], b["returns"], b["mask"]),
            diagnostics.td_concentration(b["rewards"], b["values"], b["mask"]),
            diagnostics.lambda_sensitivity(b["rewards"], b["values"], b["mask"], lam=0.7),
        )

    chex.assert_trees_all_close(some(jax.device_put(b, rows)), some(b), rtol=1e-5, atol=1e-5)


def test_within_between_variance_ignores_rounding():
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


@pytest.mark.slow
def test_bootstrap_bias_is_the_change_of_advantages():
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
        for row, result in zip(
            errors, jitted.diagnostics.bootstrap_bias(errors, mask, lam), strict=True
        ):
            assert np.max(np.abs(result)) <= np.max(np.abs(row)) + 1e-12


def test_bootstrap_bias_is_within_its_bound():
    for seed in range(5):
        b = numpy_batch(seed)
        arrays = (b[name] for name in ("returns", "advantages", "mask", "lam"))
        result = jitted.diagnostics.bootstrap_bias_bound(*arrays)
        assert result.bias <= result.bound


@pytest.mark.slow
def test_diagnostics_of_a_critic_that_learns_half_way():
    # 40 responses of 10 tokens; from the fifth on the critic knows the return, before it 1/2.
    outcomes = np.arange(40) % 2
    returns = np.repeat(outcomes[:, None], 10, 1).astype(np.float32)
    values = np.where(np.arange(10) < 5, 0.5, returns).astype(np.float32)
    rewards = np.zeros((40, 10), np.float32)
    rewards[:, -1] = outcomes
    mask = np.ones((40, 10), bool)

    @jax.jit
    def everything(rewards, values, returns, solved, mask):
        single, _ = jrl.gae(rewards, values, mask, lam=0.0)
        full, _ = jrl.gae(rewards, values, mask, lam=1.0)
        return (
            diagnostics.by_position(values, returns, mask),
            diagnostics.calibration(values, solved, mask),
            diagnostics.td_concentration(rewards, values, mask),
            diagnostics.outcome_contradiction(rewards, values, single, mask),
            diagnostics.outcome_contradiction(rewards, values, full, mask),
            diagnostics.lambda_sensitivity(rewards, values, mask, lam=1.0),
        )

    solved = outcomes[:, None].astype(bool)
    result, fit, credit, single, full, same = everything(rewards, values, returns, solved, mask)
    np.testing.assert_allclose(result.explained_variance, [0] * 5 + [1] * 5)
    np.testing.assert_allclose(result.error, [0.5] * 5 + [0] * 5)
    np.testing.assert_array_equal(result.tokens, [40] * 10)
    assert not np.any(result.bias)

    assert float(fit.ece) == 0 and float(fit.brier) == 0.125
    # One error of 1/2 on the fifth token is all there is.
    np.testing.assert_allclose(credit, [0.9, 1.0, 0.0], atol=1e-6)
    # With lam = 0 every token but that one has an advantage of 0.
    assert float(single) == pytest.approx(0.9)
    assert float(full) == 0.5
    np.testing.assert_allclose(same.correlation, [1], rtol=1e-6)
    np.testing.assert_array_equal(same.sign_agreement, [1])


def test_by_position_ignores_rounding_of_returns():
    draw = np.random.default_rng(0)
    returns = np.full((4, 300), 1e6 / 3, np.float32)
    values = returns + np.asarray(draw.normal(size=(4, 300)), np.float32)
    mask = np.ones((4, 300))
    assert not jitted.diagnostics.by_position(
        values, returns, mask, num_bins=3
    ).explained_variance.any()
    returns = 1000 + np.where(np.arange(300)[None] % 2 == 0, 1 / 16, -1 / 16) + 0 * mask
    result = jitted.diagnostics.by_position(returns + 0.5, returns, mask, num_bins=3)
    np.testing.assert_allclose(result.explained_variance, 1, atol=1e-3)


def test_relative_position_skips_masked_tokens():
    positions = jitted.diagnostics.relative_position(np.array([0, 1, 0, 1, 0]), num_bins=2)
    assert positions.tolist() == [0, 0, 0, 1, 0]


def test_negative_share_ignores_zero_advantages():
    advantages = np.array([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [-1.0, -1.0, 0.0], [2.0, 0.0, 0.0]])
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]])
    result = jitted.diagnostics.negative_share(advantages, mask)
    assert (result.responses, result.length, result.other_length) == (0.25, 2, 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_td_concentration_identity_gap_is_rounding(sign):
    # 1e8 - 1 is 1e8 in float32, so that one of the three errors is off by one.
    values = sign * np.array([[0.0, 1e8, 1.0], [0.0, 1.0, 2.0]])
    result = jitted.diagnostics.td_concentration(np.zeros((2, 3)), values, np.ones((2, 3)))
    assert result.identity_gap == 1


def test_within_variance_of_equal_advantages_is_zero():
    mask = MASK
    flat = np.array([1.0, -1.0, 0.5, 0, 2.0])[:, None] * np.ones(MASK.shape)
    result = jitted.diagnostics.within_between_variance(flat, mask)
    assert float(result.within) == 0 and float(result.ratio) == 0 and float(result.between) > 0
    nothing = jitted.diagnostics.within_between_variance(np.full(MASK.shape, 0.1), mask)
    assert float(nothing.ratio) == 0


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, 1000])
def test_terminal_reach_of_constant_and_adaptive_lambda(length):
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


def test_terminal_reach_excludes_a_weight_at_the_threshold():
    # Weights of 1, 1/2 and 1/4 from the last token on.
    assert jitted.diagnostics.terminal_reach(np.ones((1, 4)), lam=0.5, threshold=0.25).tokens == 2


def test_guard_rate_counts_lambda_at_its_floor():
    lengths = np.array([0, 5, 10, 19, 20, 21, 40, 400, 4000])
    for alpha, floor in ((0.05, 0.0), (0.05, 0.95), (1.5, 0.0)):
        lam = jrl.length_adaptive_lambda(lengths, alpha=alpha, floor=floor)[1:]
        expected = np.mean(np.asarray(lam) <= floor + 1e-6)
        actual = diagnostics.guard_rate(lengths, alpha=alpha, floor=floor)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_length_share_of_lengths_100_and_2000():
    mask = np.arange(2000) < np.array([[100], [2000]])
    share = jitted.diagnostics.length_share(mask, edges=(100,))
    np.testing.assert_allclose(share.tokens, [0.048, 0.952], atol=5e-4)
    np.testing.assert_allclose(share.responses, [0.5, 0.5])
    weights = jax.jit(jax.grad(jrl.aggregate))(np.zeros(mask.shape), mask)
    np.testing.assert_allclose(weights.sum(1), share.tokens, rtol=1e-5)


def test_group_degeneracy_weighs_groups_equally():
    correct = np.array([1, 1, 1, 1, 0, 0, 1, 0], bool)
    result = jitted.diagnostics.group_degeneracy(correct, np.array([3, 3, 3, 3, 8, 8, -1, -1]))
    np.testing.assert_allclose(result, [1 / 3, 1 / 3, 0.5, 2 / 3, 1 / 6], rtol=1e-6)


def test_calibration_clips_values_to_the_rewards():
    result = jitted.diagnostics.calibration(
        np.array([[-3.0, 7.0]]), np.array([[1]]), np.ones((1, 2))
    )
    np.testing.assert_allclose(result.brier, 0.5)
    np.testing.assert_array_equal(result.tokens, [1, *[0] * 8, 1])
