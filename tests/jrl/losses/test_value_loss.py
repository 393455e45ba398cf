"""The critic's loss and its explained variance."""

from typing import get_args

import chex
import jax
import numpy as np
import oracles
import pytest
from batches import batch
from compiled import compiled, jitted
from policy_cases import assert_a_cut_sums_to_the_whole
from tiers import full_but

import jrl

MODES = get_args(jrl.Aggregation)


def test_explained_variance_has_no_gradient():
    b = batch(0)
    slopes = jax.jit(jax.grad(lambda v, g: jrl.explained_variance(v, g, b["mask"]), argnums=(0, 1)))
    for slope in slopes(b["values"], b["returns"]):
        assert not np.any(slope)


def test_value_loss_clip_of_one_distance_and_of_zero():
    b = batch(1)
    arrays = (b["values"], b["old_values"], b["returns"], b["mask"])
    single, pair = (jitted.value_loss(*arrays, clip=clip) for clip in (0.3, (0.3, 0.3)))
    chex.assert_trees_all_equal(single, pair)
    frozen, metrics = jitted.value_loss(*arrays, clip=0)
    free, _ = jitted.value_loss(*arrays, clip=None)
    assert frozen > free and metrics["vf_clipfrac"].value() > 0
    unbound, _ = jitted.value_loss(*arrays, clip=float("inf"))
    np.testing.assert_array_equal(unbound, free)
    with pytest.raises(ValueError, match=r"clip=-0\.2 is a distance and cannot be negative"):
        jrl.value_loss(*arrays, clip=(0.1, -0.2))


def test_value_loss_clip_at_the_old_values():
    b = batch(3)

    def slope(clip):
        gradient = compiled(jax.grad(jrl.value_loss, has_aux=True))
        return gradient(b["values"], b["values"], b["returns"], b["mask"], clip=clip)[0]

    np.testing.assert_array_equal(slope(0.0), slope(None))


@pytest.mark.parametrize("mode", full_but(MODES, "seq-mean-token-mean"))
def test_value_loss_of_pieces_adds_up(mode):
    def loss(b, **denominators):
        arrays = (b["values"], b["old_values"], b["returns"], b["mask"])
        settings = {"clip": 0.2, "aggregation": mode, "max_length": 11}
        return jrl.value_loss(*arrays, **settings, **denominators)

    assert_a_cut_sums_to_the_whole(loss, range(10), by="values")


# EV-1; what lies under the mask is nobody's business.
EV_VALUES = np.array([[0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, 9]])
EV_RETURNS = np.array([[1.0, 1, 1, 1], [0, 0, 0, 5]])
EV_MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])


def test_explained_variance_records_add_up():
    pieces = [
        jrl.ExplainedVariance.of(EV_VALUES[row], EV_RETURNS[row], EV_MASK[row]) for row in (0, 1)
    ]
    np.testing.assert_allclose((pieces[0] + pieces[1]).value(), 0.536667, atol=1e-6)
    # Within each row the returns are constant, so there is nothing to explain.
    assert [float(piece.value()) for piece in pieces] == [0, 0]


@pytest.mark.parametrize("level", [0.0, 0.1, 1.0, -3.3])
def test_explained_variance_of_constant_returns_is_zero(level):
    values, returns = np.linspace(0, 1, 7), np.full(7, level)
    assert jitted.explained_variance(values, returns, np.ones(7)) == 0
    assert jrl.ExplainedVariance.of(values, returns, np.ones(7)).value() == 0


def test_explained_variance_far_from_zero():
    # Returns that vary by 1 around 1000: squares of 1e6 in float32 are exact to 0.06 only.
    draw = np.random.default_rng(0)
    returns = (1000 + draw.normal(0, 1, (3, 50))).astype(np.float32)
    values = (returns + draw.normal(0, 0.5, (3, 50))).astype(np.float32)
    mask = np.ones((3, 50), bool)
    expected = oracles.explained_variance(values, returns, mask)
    arrays = (np.asarray(values), np.asarray(returns), np.asarray(mask))
    np.testing.assert_allclose(jitted.explained_variance(*arrays), expected, rtol=1e-4)
    centred = jrl.ExplainedVariance.of(*arrays, centre=1000)
    np.testing.assert_allclose(centred.value(), expected, rtol=1e-4)
