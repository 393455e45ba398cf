"""The clipped surrogate and its loss: vectors, slow loops, identities, metrics."""

import functools
import itertools
import operator
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import MASK, batch, numpy_batch
from compiled import compiled, jitted, with_slope
from jax.test_util import check_grads
from policy_cases import assert_a_cut_sums_to_the_whole, per_token

import jrl

MODES = get_args(jrl.Aggregation)
every_mode = pytest.mark.parametrize("mode", MODES)

RATIOS = np.array([0.5, 0.79, 1, 1.25, 1.3, 4, 12])


@pytest.mark.parametrize(
    ("advantage", "settings", "loss"),
    [
        (1, {}, [-0.5, -0.79, -1, -1.2, -1.2, -1.2, -1.2]),
        (1, {"clip_high": 0.28}, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28]),
        (1, {"clip_high": 0.28, "clip_dual": 3}, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28]),
        (-1, {}, [0.8, 0.8, 1, 1.25, 1.3, 4, 12]),
        (-1, {"clip_high": 0.28}, [0.8, 0.8, 1, 1.25, 1.3, 4, 12]),
        (-1, {"clip_dual": 3}, [0.8, 0.8, 1, 1.25, 1.3, 3, 3]),
        # TRL's two-sided guard delta = 4 has the plateau of a dual clip at 4.
        (-1, {"clip_dual": 4}, [0.8, 0.8, 1, 1.25, 1.3, 4, 4]),
    ],
)
def test_vector_clip_1(advantage, settings, loss):
    ones = np.ones(7)
    result = per_token(jrl.ppo_loss, np.log(RATIOS), 0 * ones, advantage * ones, ones, **settings)
    np.testing.assert_allclose(result, loss, atol=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "ratio"),
    [(-0.3, 0.740818), (-0.1, 0.904837), (0, 1), (0.1, 1.105171), (0.3, 1.349859)],
)
def test_vector_ratio_1(log_ratio, ratio):
    one = np.ones(1)
    wide = {"clip_low": float("inf"), "clip_high": float("inf")}
    result = per_token(jrl.ppo_loss, log_ratio * one - 2, -2 * one, -one, one, **wide)
    np.testing.assert_allclose(result, [ratio], atol=1e-6)


CLIP_DUALS = (None, 1.5)


@functools.cache
def with_slopes():
    """Loss, metrics and gradient of a batch by reduction and dual clip, from one program."""
    keys = list(itertools.product(MODES, CLIP_DUALS))
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "max_length": 11}

    @jax.jit
    def run(*arrays, importance_weights):
        found = []
        for mode, clip_dual in keys:
            settings = {**bounds, "aggregation": mode, "clip_dual": clip_dual}
            loss = functools.partial(
                jrl.ppo_loss, importance_weights=importance_weights, **settings
            )
            (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(*arrays)
            metrics = {name: (m.value(), m.count) for name, m in metrics.items()}
            found.append((value, metrics, slope))
        return found

    b = numpy_batch(0)
    arrays = (b["logprobs"], b["old_logprobs"], b["advantages"], MASK)
    with jax.enable_x64(True):
        found = run(*arrays, importance_weights=b["importance_weights"])
    return dict(zip(keys, jax.device_get(found), strict=True))


@every_mode
@pytest.mark.parametrize("clip_dual", CLIP_DUALS)
def test_oracle(mode, clip_dual):
    b = numpy_batch(0)
    arrays = (b["logprobs"], b["old_logprobs"], b["advantages"], MASK)
    losses, slopes, acts = oracles.ppo(*arrays, 0.2, 0.28, clip_dual)
    losses, slopes = losses * b["importance_weights"], slopes * b["importance_weights"]
    weights = oracles.token_weights(MASK, mode, max_length=11)
    tokens = MASK.sum()
    assert (acts == "clip").sum() >= 2 and (acts == "dual").sum() >= (clip_dual is not None)
    loss, metrics, slope = with_slopes()[mode, clip_dual]
    expected = oracles.aggregate(losses, MASK, mode, max_length=11)
    # Some twenty terms in float64, with an exponential each.
    np.testing.assert_allclose(loss, expected, rtol=1e-11)
    np.testing.assert_allclose(slope, slopes * weights, rtol=1e-11, atol=1e-15)

    log_ratio = (b["logprobs"] - b["old_logprobs"])[MASK]
    expected = {
        "pg_clipfrac": (acts == "clip").sum() / tokens,
        "pg_clipfrac_lower": (acts == "dual").sum() / tokens,
        "ppo_kl": -log_ratio.mean(),
        "ratio": np.exp(log_ratio).mean(),
        "ratio_squared": np.exp(2 * log_ratio).mean(),
        "ratio_clamped": 0.0,
    }
    counts = {name: int(count) for name, (_, count) in metrics.items()}
    assert counts == dict.fromkeys(expected, int(tokens))
    found = {name: value for name, (value, _) in metrics.items()}
    chex.assert_trees_all_close(found, expected, rtol=1e-11)


@pytest.mark.slow
def test_gradients_by_finite_differences():
    b = numpy_batch(1)

    @jax.jit
    def losses(logprobs):
        arrays = (logprobs, b["old_logprobs"], b["advantages"], b["mask"])
        return [
            jrl.ppo_loss(*arrays, clip_dual=1.5, aggregation=mode, max_length=11)[0]
            for mode in MODES
        ]

    with jax.enable_x64(True):
        check_grads(losses, (b["logprobs"],), 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_cut_sums_to_the_whole(mode):
    def loss(b, **denominators):
        arrays = (b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"])
        settings = {"clip_dual": 1.5, "aggregation": mode, "max_length": 11}
        return jrl.ppo_loss(*arrays, **settings, **denominators)

    assert_a_cut_sums_to_the_whole(loss, range(10))


def test_the_first_on_policy_step_is_reinforce():
    b = batch(2)
    mask, advantages = b["mask"], b["advantages"]

    def reinforce(logprobs):
        return jrl.aggregate(-advantages * logprobs, mask)

    # Also at bounds of zero, where every ratio lies exactly on its bound.
    for clip in (0.2, 0.0):
        slope, metrics = compiled(jax.grad(jrl.ppo_loss, has_aux=True))(
            b["logprobs"], b["logprobs"], advantages, mask, clip_low=clip, clip_high=clip
        )
        np.testing.assert_allclose(slope, jax.jit(jax.grad(reinforce))(b["logprobs"]), rtol=1e-6)
        assert metrics["pg_clipfrac"].value() == 0
        assert metrics["ratio"].value() == metrics["ratio_squared"].value() == 1


def test_without_bounds_it_is_importance_weighted_reinforce():
    b = batch(3)
    off = {"clip_low": float("inf"), "clip_high": float("inf"), "max_log_ratio": None}

    def clipped(logprobs):
        arrays = (logprobs, b["old_logprobs"], b["advantages"], b["mask"])
        return jrl.ppo_loss(*arrays, **off)[0]

    def weighted(logprobs):
        ratio = jnp.exp(logprobs - b["old_logprobs"])
        return jrl.aggregate(-ratio * b["advantages"], b["mask"])

    actual, expected = (jax.jit(jax.value_and_grad(f))(b["logprobs"]) for f in (clipped, weighted))
    chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_the_gradient_vanishes_exactly_where_a_bound_binds():
    ones = np.ones(7)

    def loss(logprobs, advantage, clip_dual):
        arrays = (logprobs, 0 * ones, advantage * ones, ones)
        return jnp.sum(per_token(jrl.ppo_loss, *arrays, clip_dual=clip_dual))

    slope = jax.jit(jax.grad(loss))(np.log(RATIOS), 1.0, None)
    assert (slope != 0).tolist() == [True, True, True, False, False, False, False]
    slope = jax.jit(jax.grad(loss))(np.log(RATIOS), -1.0, 3)
    assert (slope != 0).tolist() == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_ratios_of_zero_and_infinity_are_finite_and_counted(advantage):
    logprobs = np.array([[-np.inf, -1.0, -500.0, -0.5, -1.0]])
    old = np.array([[-1.0, -np.inf, -1.0, -500.0, -1.0]])
    ones = np.ones_like(old)
    (loss, metrics), slope = with_slope(jrl.ppo_loss)(logprobs, old, advantage * ones, ones)
    chex.assert_tree_all_finite((loss, slope, [x.value() for x in metrics.values()]))
    assert not np.any(slope[:, :4])
    assert metrics["ratio_clamped"].sum == 4


def test_the_clamp_of_the_log_ratio_is_an_argument():
    one = np.ones(1)
    arrays = (one, 0 * one, -one, one)
    assert per_token(jrl.ppo_loss, *arrays, max_log_ratio=0.5)[0] == pytest.approx(np.exp(0.5))
    assert per_token(jrl.ppo_loss, *arrays, max_log_ratio=None)[0] == pytest.approx(np.exp(1))
    _, metrics = jitted.ppo_loss(*arrays, max_log_ratio=0.5)
    assert metrics["ratio_clamped"].value() == 1
    assert per_token(jrl.ppo_loss, 25 * one, 0 * one, -one, one)[0] == pytest.approx(np.exp(20))


def test_advantages_per_row_spread_over_tokens():
    b = batch(4)
    per_row = b["advantages"][:, :1]
    arrays = (b["logprobs"], b["old_logprobs"])
    spread = np.broadcast_to(per_row, MASK.shape)
    weights = b["importance_weights"][:, :1]
    actual = jitted.ppo_loss(*arrays, per_row, b["mask"], importance_weights=weights)
    weights = np.broadcast_to(weights, MASK.shape)
    expected = jitted.ppo_loss(*arrays, spread, b["mask"], importance_weights=weights)
    chex.assert_trees_all_equal(actual, expected)


def test_bounds_that_make_no_sense_are_refused():
    one = np.ones(1)
    with pytest.raises(ValueError, match=r"clip_low=-0.1 is a distance"):
        jrl.ppo_loss(one, one, one, one, clip_low=-0.1)
    with pytest.raises(ValueError, match=r"clip_high=-0.3 is a distance"):
        jrl.ppo_loss(one, one, one, one, clip_high=-0.3)
    with pytest.raises(ValueError, match="clip_dual=1 must be above 1, such as 3; None is off"):
        jrl.ppo_loss(one, one, one, one, clip_dual=1)


def test_a_log_ratio_at_its_bound_is_not_clamped():
    logprobs, zero, one = np.array([0.5]), np.zeros(1), np.ones(1)
    off = {"clip_low": float("inf"), "clip_high": float("inf")}

    def loss(logprobs, bound):
        return jrl.ppo_loss(logprobs, zero, one, one, max_log_ratio=bound, **off)

    def weighted(logprobs, bound):
        return jrl.dro_loss(logprobs, zero, one, one, beta=0.0, max_log_ratio=bound)[0]

    for bound, acts in ((0.5, False), (0.49, True)):
        slope, metrics = jax.jit(jax.grad(loss, has_aux=True))(logprobs, bound)
        assert float(metrics["ratio_clamped"].sum) == acts
        np.testing.assert_allclose(slope, 0 if acts else -np.exp(0.5), rtol=1e-6)
        # The floor of log-probabilities that are not a ratio.
        assert float(jax.jit(jax.grad(weighted))(-logprobs, bound)[0]) == (0 if acts else -1)


POSITIVE = np.array([[-1.0, -2, -0.5], [-0.3, -0.4, 0], [-4, 0, 0]])
POSITIVE_MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]])


def test_vector_poslm_1():
    correct = np.array([1, 0, 1])
    loss, metrics = jitted.positive_example_loss(POSITIVE, correct, POSITIVE_MASK)
    np.testing.assert_allclose(loss, 1.875, atol=1e-6)
    np.testing.assert_allclose(metrics["positive_nll"].value(), 1.875, atol=1e-6)
    assert metrics["positive_nll"].count == 4


def test_positive_examples_cut_into_rows_sum_to_the_whole():
    correct = np.array([True, False, True])
    parts = [
        jitted.positive_example_loss(
            POSITIVE[row : row + 1],
            correct[row : row + 1],
            POSITIVE_MASK[row : row + 1],
            num_tokens=4,
        )
        for row in range(3)
    ]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), 1.875, atol=1e-6)
    metric = functools.reduce(operator.add, (metrics["positive_nll"] for _, metrics in parts))
    np.testing.assert_allclose(metric.value(), 1.875, atol=1e-6)


def test_the_gradient_of_positive_examples():
    correct = np.array([1.0, 0.0, 1.0])

    def loss(logprobs, correct):
        return jrl.positive_example_loss(logprobs, correct, POSITIVE_MASK)[0]

    slope = jax.jit(jax.grad(loss))(POSITIVE, correct)
    np.testing.assert_allclose(slope, [[-0.25] * 3, [0] * 3, [-0.25, 0, 0]])
    assert not np.any(jax.jit(jax.grad(loss))(POSITIVE, 0 * correct))
    assert loss(POSITIVE, 0 * correct) == 0


def test_without_an_aggregation_there_are_no_denominators():
    b = batch(3)
    arrays = b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]
    given = {"num_tokens": 3, "num_sequences": None, "empty_rows": "count"}
    for loss in (jrl.ppo_loss, jrl.gspo_loss):
        with pytest.raises(
            ValueError, match=r"^aggregation=None .* num_tokens, empty_rows, or choose an agg"
        ):
            jax.eval_shape(functools.partial(loss, aggregation=None, **given), *arrays)
        # What was not given is no denominator.
        losses, metrics = compiled(loss)(*arrays, aggregation=None, num_tokens=None)
        reduced, others = compiled(loss)(*arrays, aggregation="token-sum")
        assert losses.shape == MASK.shape and not np.any(np.asarray(losses)[~MASK])
        np.testing.assert_allclose(np.sum(losses), reduced, rtol=1e-6)
        chex.assert_trees_all_equal(metrics, others)


def test_weights_are_factors_of_the_losses_of_tokens():
    b = batch(4)
    arrays = b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]
    weights = b["importance_weights"]
    weighted = per_token(jrl.ppo_loss, *arrays, importance_weights=weights)
    np.testing.assert_array_equal(weighted, per_token(jrl.ppo_loss, *arrays) * weights)
