"""Sums of distances and scores against loops, and what they promise."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiers import full_but

from jrl.faults.minder.embedding import MANY_DIMS, distance_sums, normal_score, sums_by_products


@pytest.mark.parametrize("dims", full_but([5, MANY_DIMS + 3], 5))
def test_sums_against_a_loop(dims):
    points = 3 + np.random.default_rng(0).normal(size=(3, dims, 32)).astype(np.float32)
    counted = np.arange(32) < 19
    sums = np.asarray(distance_sums(jnp.asarray(points), jnp.asarray(counted)))
    for w in range(3):
        for i in range(19):
            expected = sum(np.linalg.norm(points[w, :, i] - points[w, :, j]) for j in range(19))
            assert sums[w, i] == pytest.approx(expected, rel=1e-5)  # float32 sums of 19


def test_products_are_exact_enough_where_most_cancels():
    """Points far from zero and close to each other, one of them far: the worst case for them."""
    points = 0.5 + 1e-2 * np.random.default_rng(0).normal(size=(2, 56, 32)).astype(np.float32)
    points[:, :, 3] += 0.5
    counted = np.arange(32) < 29
    sums = np.asarray(sums_by_products(jnp.asarray(points), jnp.asarray(counted)))
    wide = np.float64(points)
    exact = np.linalg.norm(wide[:, :, :, None] - wide[:, :, None], axis=1)[..., :29].sum(-1)
    # Squares of 0.01 from products of 14, which float32 holds to 1e-6 or so each way.
    np.testing.assert_allclose(sums[:, :29], exact[:, :29], rtol=1e-3)


@pytest.mark.slow
def test_score_against_a_loop():
    points = np.random.default_rng(1).normal(size=(1, 4, 16)).astype(np.float32)
    counted = np.arange(16) < 7
    sums = distance_sums(jnp.asarray(points), jnp.asarray(counted))
    score = np.asarray(normal_score(sums, jnp.asarray(counted)))[0]
    distance = np.linalg.norm(points[0, :, :, None] - points[0, :, None, :], axis=0)
    for i in range(7):
        others = [j for j in range(7) if j != i]
        own = np.mean([distance[i, j] for j in others])
        among = np.mean([distance[j, k] for j in others for k in others if j != k])
        assert score[i] == pytest.approx(own / among, rel=1e-4)
    assert (score[7:] == 0).all()


@pytest.mark.slow
def test_equal_machines_score_nothing():
    counted = jnp.ones(16, bool)
    sums = distance_sums(jnp.ones((2, 3, 16)), counted)
    assert not np.asarray(normal_score(sums, counted)).any()


def test_the_floor_keeps_small_differences_small():
    points = np.zeros((1, 1, 16), np.float32)
    points[0, 0, 0] = 0.001
    counted = jnp.ones(16, bool)
    sums = distance_sums(jnp.asarray(points), counted)
    assert np.asarray(normal_score(sums, counted))[0, 0] > 100
    assert np.asarray(normal_score(sums, counted, floor=0.01))[0].max() < 0.2
