"""Masks of tokens and sequences: who is kept, counts, ties, cuts."""

import functools
import math

import jax
import numpy as np
import pytest
from batches import MASK, batch
from compiled import jitted
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import per_token

import jrl


@functools.partial(jax.jit, static_argnums=2)
def _top(entropy, mask, fraction):
    return jrl.top_entropy_mask(entropy, mask, fraction=fraction)


@pytest.mark.slow
@given(st.integers(1, 40), st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, 0.8, 1.0]))
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
def test_top_entropy_mask_keeps_the_quantile(count, fraction):
    # All in one shape, of which `count` are true; entropies are far apart.
    entropy = np.random.default_rng(count).permutation(40) + 1.0
    mask = np.arange(40) < count
    kept = np.asarray(_top(np.asarray(entropy, np.float32), np.asarray(mask), fraction))
    assert kept.sum() == math.floor(fraction * (count - 1) + 1e-9) + 1
    # TRL's rule: at or above the interpolated quantile, which is rounded, hence the margin.
    quantile = np.quantile(entropy[:count], 1 - fraction)
    np.testing.assert_array_equal(kept, mask & (entropy >= quantile - 1e-6))


def test_top_entropy_mask_keeps_ties():
    entropy = np.array([1.0, 2.0, 2.0, 0.5, 2.0, 3.0])
    kept = jitted.top_entropy_mask(entropy, np.ones(6), fraction=0.2)
    assert kept.tolist() == [False, True, True, False, True, True]
    b = batch(0)
    threshold = jitted.entropy_threshold(b["entropy"], b["mask"], fraction=0.4)
    full = jitted.top_entropy_mask(b["entropy"], b["mask"], fraction=0.4)
    assert 0 < full.sum() < MASK.sum()
    for row in range(len(MASK)):
        mine = jitted.top_entropy_mask(b["entropy"][row], b["mask"][row], threshold=threshold)
        np.testing.assert_array_equal(mine, full[row])


def test_top_entropy_mask_with_fraction_one():
    b = batch(1)
    everything = jitted.top_entropy_mask(b["entropy"], b["mask"], fraction=1)
    np.testing.assert_array_equal(everything, MASK)
    mask = jitted.top_entropy_mask(b["entropy"], b["mask"], fraction=0.3)
    arrays = (b["logprobs"], b["old_logprobs"], b["advantages"])
    loss, metrics = jitted.ppo_loss(*arrays, mask)
    expected = np.asarray(per_token(jrl.ppo_loss, *arrays, b["mask"]))[np.asarray(mask)].mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert metrics["ratio"].count == mask.sum()


def test_entropy_threshold_of_a_single_token():
    entropy, mask = np.array([3.0, 2.0, 5.0]), np.array([0, 1, 0])
    for fraction in (0.2, 1):
        assert float(jitted.entropy_threshold(entropy, mask, fraction=fraction)) == 2
    slope = jax.jit(jax.grad(lambda x: jrl.entropy_threshold(x, mask, fraction=0.2)))(entropy)
    assert not np.any(slope)


def test_off_policy_sequence_mask_keeps_a_divergence_at_its_bound():
    behaviour, bad = np.zeros((2, 2)), -np.ones((2, 1))
    # The second row has one token: its sum is its mean.
    logprobs, mask = np.array([[-1.0, -2.0], [-1.5, 0.0]]), np.array([[1, 1], [1, 0]])
    for bound, kept in ((1.5, [True, True]), (1.49, [False, False]), (0.8, [False, False])):
        result = jitted.off_policy_sequence_mask(
            logprobs, behaviour, bad, mask, max_divergence=bound
        )
        assert result[:, 0].tolist() == kept


def test_off_policy_sequence_mask_drops_bad_far_sequences():
    behaviour = np.array([[-1.0, -1.0, np.nan], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    logprobs = np.array([[-2.0, -1.2, np.nan], [-2.0, -1.2, -1.0], [-0.1, -0.1, -0.1]])
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 1, 1]])

    def kept(advantages, bound=0.5):
        result = jitted.off_policy_sequence_mask(
            logprobs, behaviour, advantages, mask, max_divergence=bound
        )
        assert not np.any(np.asarray(result) & (np.asarray(mask) == 0))
        return result[:, 0].tolist()

    # Means over the true tokens: 0.6, 0.4 and -0.9.
    bad = -np.ones((3, 1))
    assert kept(bad) == [False, True, True]
    assert kept(bad, 0.3) == [False, False, True]
    assert kept(bad, -1.0) == [False, False, False]
    assert kept(-bad, -1.0) == kept(0 * bad, -1.0) == [True, True, True]
    per_token = np.array([[-1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    result = jitted.off_policy_sequence_mask(
        logprobs, behaviour, per_token, mask, max_divergence=0.5
    )
    assert result[0].tolist() == [False, True, False]


def test_selection_masks_keep_nan():
    nan, ones = np.array([np.nan, 1.0]), np.ones(2)
    assert jitted.top_entropy_mask(nan, ones, fraction=0.5)[0]
    assert jitted.off_policy_sequence_mask(nan, ones, -ones, ones, max_divergence=0.1).all()
