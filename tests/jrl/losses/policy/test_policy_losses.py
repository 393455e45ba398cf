"""The clipped surrogate of PPO, its two-sided guard, and the loss of positive examples."""

import functools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import MASK, batch
from compiled import compiled, jitted, with_slope
from policy_cases import per_token

import jrl

RATIOS = np.array([0.5, 0.79, 1, 1.25, 1.3, 4, 12])


def test_ppo_without_bounds_is_importance_weighted_reinforce():
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


def test_ppo_gradient_is_zero_beyond_its_bounds():
    ones = np.ones(7)

    def loss(logprobs, advantage, clip_dual):
        arrays = (logprobs, 0 * ones, advantage * ones, ones)
        return jnp.sum(per_token(jrl.ppo_loss, *arrays, clip_dual=clip_dual))

    slope = jax.jit(jax.grad(loss))(np.log(RATIOS), 1.0, None)
    assert (slope != 0).tolist() == [True, True, True, False, False, False, False]
    slope = jax.jit(jax.grad(loss))(np.log(RATIOS), -1.0, 3)
    assert (slope != 0).tolist() == [False, False, True, True, True, False, False]


def test_ppo_log_ratio_at_its_bound_is_not_clamped():
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


def test_positive_example_loss_of_rows_adds_up():
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


def test_ppo_without_aggregation_refuses_denominators():
    b = batch(3)
    arrays = b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]
    inputs = {"num_tokens": 3, "num_sequences": None, "empty_rows": "count"}
    for loss in (jrl.ppo_loss, jrl.gspo_loss):
        with pytest.raises(
            ValueError, match=r"^aggregation=None .* num_tokens, empty_rows, or choose an agg"
        ):
            jax.eval_shape(functools.partial(loss, aggregation=None, **inputs), *arrays)
        # What was not given is no denominator.
        losses, metrics = compiled(loss)(*arrays, aggregation=None, num_tokens=None)
        reduced, others = compiled(loss)(*arrays, aggregation="token-sum")
        assert losses.shape == MASK.shape and not np.any(np.asarray(losses)[~MASK])
        np.testing.assert_allclose(np.sum(losses), reduced, rtol=1e-6)
        chex.assert_trees_all_equal(metrics, others)


NAMES = ("logprobs", "old_logprobs", "advantages", "mask")


def test_ppo_guard_is_a_dual_clip_at_the_same_ratio():
    b = batch(0)
    arrays = [b[name] for name in NAMES]
    step = with_slope(jrl.ppo_loss)
    guard = step(*arrays, guard=1.5)
    assert guard[0][1]["pg_clipfrac_lower"].sum > 0
    chex.assert_trees_all_equal(guard, step(*arrays, clip_dual=1.5))
    # Together, the lower of the two acts.
    both = step(*arrays, guard=1.5, clip_dual=3)
    chex.assert_trees_all_equal(guard, both)


def test_ppo_gradient_is_zero_beyond_the_guard():
    ones = np.ones(7)

    def loss(logprobs):
        return jnp.sum(per_token(jrl.ppo_loss, logprobs, 0 * ones, -ones, ones, guard=3))

    slope = jax.jit(jax.grad(loss))(np.log(RATIOS))
    assert (slope != 0).tolist() == [False, False, True, True, True, False, False]


def test_ppo_guard_does_not_act_at_its_ratio():
    # The ratio is the guard to the bit, and would be clipped beyond it.
    log_ratio = np.array([1.5])
    guard = float(np.exp(log_ratio)[0])
    arrays = (0 * log_ratio, -np.ones(1), np.ones(1))

    def loss(logprobs, guard):
        return jrl.ppo_loss(logprobs, *arrays, clip_high=0.28, guard=guard)

    for bound, acts in ((guard, False), (guard * (1 - 1e-6), True)):
        slope, metrics = jax.jit(jax.grad(loss, has_aux=True))(log_ratio, bound)
        assert (float(slope[0]) == 0) == acts
        assert float(metrics["pg_clipfrac_lower"].sum) == acts


def test_ppo_guard_ignores_advantages_of_zero():
    ones = np.ones(3)
    advantages = np.array([-1.0, 0.0, 0.5])
    _, metrics = jitted.ppo_loss(np.log(5 * ones), 0 * ones, advantages, ones, guard=3)
    assert float(metrics["pg_clipfrac_lower"].sum) == 1


def test_ppo_guard_below_an_array_of_bounds_acts():
    ones = np.ones(7)
    arrays = (np.log(RATIOS), 0 * ones, ones, ones)
    result = per_token(jrl.ppo_loss, *arrays, clip_high=0.5 * ones, guard=1.28)
    np.testing.assert_allclose(result, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28], atol=1e-6)
