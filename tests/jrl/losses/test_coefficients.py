"""Adaptive coefficients, the bounded head, length penalties, the overlong filter, groups."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import MASK
from compiled import jitted
from jax.test_util import check_grads

import jrl


def test_adaptive_kl_coefficient_moves_towards_its_target():
    def move(kl):
        settings = {"target": 0.1, "num_samples": 50, "horizon": 100}
        return float(jrl.adaptive_kl_coefficient(0.4, kl, **settings))

    moved = [move(kl) for kl in (0.0, 0.05, 0.099, 0.1, 0.101, 0.3, 9.0)]
    assert moved == sorted(moved)
    np.testing.assert_allclose([moved[0], moved[3], moved[-1]], [0.36, 0.4, 0.44], rtol=1e-6)


def test_adaptive_entropy_coefficient_is_zero_above_its_target():
    coefficient, expected = np.asarray(0.008), 0.008
    step = jax.jit(jrl.adaptive_entropy_coefficient)
    for entropy in (0.3, 0.3, 0.3, 0.2, 0.1, 0.1, 0.25, 0.05):
        coefficient, applied = step(coefficient, entropy)
        expected, now = oracles.adaptive_entropy_coefficient(expected, entropy)
        np.testing.assert_allclose([coefficient, applied], [expected, now], atol=1e-8)
        assert (float(applied) == 0) == (entropy > 0.2)


def test_adaptive_coefficients_have_no_gradient():
    settings = {"target": 6, "num_samples": 256, "horizon": 1e4}
    slope = jax.jit(jax.grad(lambda kl: jrl.adaptive_kl_coefficient(0.2, kl, **settings)))(5.9)
    assert slope == 0
    assert jax.jit(jax.grad(lambda c: jrl.adaptive_entropy_coefficient(c, 0.1)[1]))(0.1) == 0


@pytest.mark.slow
def test_bounded_value_rises_within_its_bounds():
    x = np.linspace(-50, 50, 101)
    values = jitted.bounded_value(x, low=-1.0, high=2.0)
    assert np.all(np.diff(values) > 0) and values.min() > -1 and values.max() < 2
    np.testing.assert_allclose(values + values[::-1], np.ones(101), atol=1e-5)
    with jax.enable_x64(True):
        call = lambda x: jrl.bounded_value(x, low=-1.0, high=2.0)  # noqa: E731 - with its bounds
        check_grads(jax.jit(call), (np.linspace(-3.0, 3, 7),), order=2)
        assert call(np.zeros(1)).dtype == jnp.float64
    assert jitted.bounded_value(np.zeros(1, jnp.bfloat16), low=0, high=1).dtype == np.float32


def test_overlong_filter_removes_rows_from_means():
    truncated = np.array([1, 0, 0, 1, 1])
    mask = jitted.overlong_filter(MASK, truncated)
    np.testing.assert_array_equal(mask, MASK & (np.array([0, 1, 1, 0, 0])[:, None] == 1))
    loss = np.asarray(np.random.default_rng(0).normal(size=MASK.shape))
    np.testing.assert_allclose(jitted.aggregate(loss, mask), loss[1:3][MASK[1:3]].mean(), rtol=1e-5)
    row = jitted.overlong_filter(MASK[1], np.asarray(True))
    assert row.shape == MASK[1].shape and not np.any(row)


def test_overlong_penalty_without_a_floor():
    lengths = np.arange(0, 40)
    paper = jitted.overlong_penalty(lengths, max_length=20, buffer=5)
    verl = jitted.overlong_penalty(lengths, max_length=20, buffer=5, floor=None)
    np.testing.assert_allclose(paper[:21], verl[:21])
    np.testing.assert_allclose(verl[20:], -1 - np.arange(20) / 5, rtol=1e-6)
    assert np.all(paper[20:] == -1)


def test_overlong_penalty_has_no_gradient():
    lengths = np.array([82.0, 90.0])
    slope = jax.jit(
        jax.grad(lambda n: jnp.sum(jrl.overlong_penalty(n, max_length=100, buffer=20)))
    )(lengths)
    np.testing.assert_array_equal(slope, [0, 0])


@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.float32, jnp.bfloat16])
def test_informative_groups_have_nonzero_advantages(dtype):
    scores = np.array([1, 0, 1, 1, 1, 0, 0]).astype(dtype)
    groups = np.array([6, 6, 2, 2, 9, 4, 4])
    informative = jitted.informative_groups(scores, groups)
    assert informative.tolist() == [True, True, False, False, False, False, False]
    advantages = jitted.grpo_advantages(scores.astype(np.float32), groups)
    np.testing.assert_array_equal(advantages != 0, informative)


def test_informative_groups_of_equal_decimal_scores():
    assert not np.any(jitted.informative_groups(np.full(7, 0.1), np.zeros(7, int)))
