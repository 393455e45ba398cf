"""GSPO, LUSPO and GMPO: published numbers, two forms of one gradient, lengths, bounds."""

import chex
import jax
import numpy as np
import pytest
from batches import MASK, batch
from compiled import compiled, jitted
from policy_cases import MASK_1, arrays, per_token, sequences, value_and_slope

import jrl

OFF = {"clip_low": float("inf"), "clip_high": float("inf")}
FORMS = ("token", "sequence")


def per_row(b):
    """The arrays of a loss with one advantage for each row."""
    return b["logprobs"], b["old_logprobs"], b["advantages"][:, :1], b["mask"]


@pytest.mark.parametrize("gradient", FORMS)
def test_gspo_clips_by_the_sign_of_the_advantage(gradient):
    logprobs, old, advantages, mask = sequences()
    flipped = (logprobs, old, -advantages, mask)
    losses, slope = value_and_slope(jrl.gspo_loss, flipped, gradient=gradient)
    np.testing.assert_allclose(losses, [[0.9997] * 3, [-0.5002] * 2 + [0]], atol=1e-6)
    assert not slope.any()
    _, metrics = jitted.gspo_loss(*flipped, gradient=gradient)
    assert metrics["pg_clipfrac"].value() == 1
    assert "pg_clipfrac_lower" not in metrics


@pytest.mark.slow
def test_gspo_gradients_agree_for_one_advantage_per_row():
    b = batch(0)
    for given, equal in ((per_row(b), True), (arrays(b), False)):
        for mode in ("seq-mean-token-mean", "token-mean"):
            (first, slope), (second, other) = (
                jax.jit(
                    jax.value_and_grad(
                        lambda logprobs, form=form, given=given, mode=mode: jrl.gspo_loss(
                            logprobs,
                            *given[1:],
                            clip_low=0.1,
                            clip_high=0.2,
                            gradient=form,
                            aggregation=mode,
                        )[0]
                    )
                )(given[0])
                for form in FORMS
            )
            np.testing.assert_allclose(first, second, rtol=1e-6)
            assert np.allclose(slope, other, rtol=1e-5, atol=1e-7) == equal
            assert np.any(slope) and np.any(other)


def test_gspo_sequence_gradient_is_equal_within_a_row():
    b = batch(1)
    _, slope = value_and_slope(jrl.gspo_loss, arrays(b), gradient="sequence", **OFF)
    _, own = value_and_slope(jrl.gspo_loss, arrays(b), gradient="token", **OFF)
    for row, mask in zip(slope, MASK, strict=True):
        if mask.any():
            np.testing.assert_allclose(row[mask], row[mask][0], rtol=1e-6)
    np.testing.assert_allclose(slope.sum(1), own.sum(1), rtol=1e-5, atol=1e-6)
    assert not np.allclose(slope, own, rtol=1e-2)


def test_luspo_is_gspo_times_the_length():
    b = batch(2)
    bounds = {"clip_low": 0.1, "clip_high": 0.2}
    luspo = value_and_slope(jrl.luspo_loss, arrays(b), **bounds)
    gspo = value_and_slope(jrl.gspo_loss, arrays(b), **bounds)
    length = MASK.sum(1, keepdims=True)
    for actual, base in zip(luspo, gspo, strict=True):
        np.testing.assert_allclose(actual, length * base, rtol=1e-6)
    actual, metrics = jitted.luspo_loss(*arrays(b), **bounds)
    summed, same = jitted.gspo_loss(*arrays(b), aggregation="seq-mean-token-sum", **bounds)
    np.testing.assert_allclose(actual, summed, rtol=1e-6)
    chex.assert_trees_all_equal(metrics, same)


def test_gmpo_clips_tokens_by_the_sign_of_their_advantage():
    logprobs, old, advantages, mask = sequences()
    losses, slope = value_and_slope(jrl.gmpo_loss, (logprobs, old, -advantages, mask))
    np.testing.assert_allclose(losses[1, :2], -0.5 * np.exp((0.4 + 0.1) / 2), rtol=1e-6)
    assert slope[1, 0] == 0 and slope[1, 1] == pytest.approx(losses[1, 0])
    _, metrics = jitted.gmpo_loss(logprobs, old, -advantages, mask)
    np.testing.assert_allclose(metrics["pg_clipfrac"].value(), 1 / 5)


def test_gmpo_weights_by_the_mean_advantage():
    logprobs, old = np.array([[-1.0, -1.0, -1.0]]), np.array([[-2.0, -0.2, -1.5]])
    advantages, mask = np.array([[2.0, -0.5, 0.0]]), np.ones((1, 3))
    losses, slope = value_and_slope(jrl.gmpo_loss, (logprobs, old, advantages, mask))
    # Clipped above at 0.4, below at -0.4, and left out.
    np.testing.assert_allclose(losses, [[-0.5] * 3], rtol=1e-6)
    assert not slope.any()
    losses, slope = value_and_slope(
        jrl.gmpo_loss, (logprobs, old, advantages, mask), clip_low=1.0, clip_high=2.0
    )
    np.testing.assert_allclose(losses, [[-0.5 * np.exp((1 - 0.8) / 3)] * 3], rtol=1e-6)
    np.testing.assert_allclose(slope, [[losses[0, 0], losses[0, 0], 0]], rtol=1e-6)


def test_without_bounds_gmpo_is_the_sequence_form_of_gspo():
    b = batch(3)
    gmpo = value_and_slope(jrl.gmpo_loss, per_row(b), **OFF)
    gspo = value_and_slope(jrl.gspo_loss, per_row(b), gradient="sequence", **OFF)
    chex.assert_trees_all_close(gmpo, gspo, rtol=1e-5, atol=1e-6)


def test_sequence_ratio_losses_count_clamped_tokens():
    logprobs, old, advantages, mask = sequences()
    assert MASK_1[1, 0]
    far = logprobs.copy()
    far[1, 0] = -np.inf
    for loss in (jrl.gspo_loss, jrl.luspo_loss, jrl.gmpo_loss):
        _, metrics = compiled(loss)(far, old, advantages, mask)
        np.testing.assert_allclose(metrics["ratio_clamped"].value(), 1 / 5)
    # One impossible token cannot carry the mean of the others beyond the clamp.
    losses = per_token(jrl.gspo_loss, far, old, -advantages, mask, **OFF)
    np.testing.assert_allclose(losses[1, 0], -0.5 * np.exp((0.1 - 20) / 2), rtol=1e-5)
