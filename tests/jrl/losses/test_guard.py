"""The two-sided guard of the clipped surrogate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch

import jrl

RATIOS = jnp.array([0.5, 0.79, 1, 1.25, 1.3, 4, 12])
NAMES = ("logprobs", "old_logprobs", "advantages", "mask")


@pytest.mark.parametrize(
    ("advantage", "loss"),
    [
        (1, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28]),
        (-1, [0.8, 0.8, 1, 1.25, 1.3, 4, 4]),
    ],
)
def test_vector_clip_1_delta(advantage, loss):
    ones = jnp.ones(7)
    arrays = (jnp.log(RATIOS), 0 * ones, advantage * ones, ones)
    result = jrl.ppo_surrogate(*arrays, clip_high=0.28, guard=4)
    np.testing.assert_allclose(result, loss, atol=1e-6)


def test_it_is_a_dual_clip_at_the_same_ratio():
    b = batch(0)
    arrays = [b[name] for name in NAMES]
    step = jax.value_and_grad(jrl.ppo_loss, has_aux=True)
    guard = step(*arrays, guard=1.5)
    assert guard[0][1]["pg_clipfrac_lower"].sum > 0
    jax.tree.map(np.testing.assert_array_equal, guard, step(*arrays, clip_dual=1.5))
    # Together, the lower of the two acts.
    both = step(*arrays, guard=1.5, clip_dual=3)
    jax.tree.map(np.testing.assert_array_equal, guard, both)


def test_the_gradient_vanishes_beyond_it():
    ones = jnp.ones(7)

    def loss(logprobs):
        return jnp.sum(jrl.ppo_surrogate(logprobs, 0 * ones, -ones, ones, guard=3))

    slope = jax.grad(loss)(jnp.log(RATIOS))
    assert (slope != 0).tolist() == [False, False, True, True, True, False, False]


def test_bounds_given_as_arrays_are_not_checked_and_the_lower_acts():
    ones = jnp.ones(7)
    arrays = (jnp.log(RATIOS), 0 * ones, ones, ones)
    result = jrl.ppo_surrogate(*arrays, clip_high=0.5 * ones, guard=1.28)
    np.testing.assert_allclose(result, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28], atol=1e-6)


def test_a_guard_that_would_clip_first_is_refused():
    one = jnp.ones(1)
    for guard in (1, 1.2):
        with pytest.raises(ValueError, match=f"guard={guard} must be above 1 \\+ clip_high"):
            jrl.ppo_loss(one, one, one, one, guard=guard)
    with pytest.raises(ValueError, match=r"guard=0\.5 must be above 1"):
        jrl.ppo_surrogate(one, one, one, one, clip_high=one, guard=0.5)
