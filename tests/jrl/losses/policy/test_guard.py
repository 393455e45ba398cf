"""The two-sided guard of the clipped surrogate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch
from compiled import jitted, with_slope
from policy_cases import per_token

import jrl

RATIOS = np.array([0.5, 0.79, 1, 1.25, 1.3, 4, 12])
NAMES = ("logprobs", "old_logprobs", "advantages", "mask")


@pytest.mark.parametrize(
    ("advantage", "loss"),
    [
        (1, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28]),
        (-1, [0.8, 0.8, 1, 1.25, 1.3, 4, 4]),
    ],
)
def test_vector_clip_1_delta(advantage, loss):
    ones = np.ones(7)
    arrays = (np.log(RATIOS), 0 * ones, advantage * ones, ones)
    result = per_token(jrl.ppo_loss, *arrays, clip_high=0.28, guard=4)
    np.testing.assert_allclose(result, loss, atol=1e-6)


def test_it_is_a_dual_clip_at_the_same_ratio():
    b = batch(0)
    arrays = [b[name] for name in NAMES]
    step = with_slope(jrl.ppo_loss)
    guard = step(*arrays, guard=1.5)
    assert guard[0][1]["pg_clipfrac_lower"].sum > 0
    chex.assert_trees_all_equal(guard, step(*arrays, clip_dual=1.5))
    # Together, the lower of the two acts.
    both = step(*arrays, guard=1.5, clip_dual=3)
    chex.assert_trees_all_equal(guard, both)


def test_the_gradient_vanishes_beyond_it():
    ones = np.ones(7)

    def loss(logprobs):
        return jnp.sum(per_token(jrl.ppo_loss, logprobs, 0 * ones, -ones, ones, guard=3))

    slope = jax.jit(jax.grad(loss))(np.log(RATIOS))
    assert (slope != 0).tolist() == [False, False, True, True, True, False, False]


def test_at_the_guard_it_does_not_act_yet():
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


def test_an_advantage_of_0_is_not_guarded():
    ones = np.ones(3)
    advantages = np.array([-1.0, 0.0, 0.5])
    _, metrics = jitted.ppo_loss(np.log(5 * ones), 0 * ones, advantages, ones, guard=3)
    assert float(metrics["pg_clipfrac_lower"].sum) == 1


def test_bounds_given_as_arrays_are_not_checked_and_the_lower_acts():
    ones = np.ones(7)
    arrays = (np.log(RATIOS), 0 * ones, ones, ones)
    result = per_token(jrl.ppo_loss, *arrays, clip_high=0.5 * ones, guard=1.28)
    np.testing.assert_allclose(result, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28], atol=1e-6)


def test_a_guard_that_would_clip_first_is_refused():
    one = np.ones(1)
    for guard in (1, 1.2):
        with pytest.raises(ValueError, match=f"guard={guard} must be above 1 \\+ clip_high"):
            jrl.ppo_loss(one, one, one, one, guard=guard)
    with pytest.raises(ValueError, match=r"guard=0\.5 must be above 1"):
        jrl.ppo_loss(one, one, one, one, clip_high=one, guard=0.5)
