"""Coefficients that steer themselves, the bounded head, the overlong filter."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import MASK
from compiled import jitted
from jax.test_util import check_grads

import jrl


def test_vector_kl_2():
    coefficient, seen = np.asarray(0.2), []
    step = jax.jit(lambda c, kl: jrl.adaptive_kl_coefficient(
        c, kl, target=6, num_samples=256, horizon=1e4
    ))  # fmt: skip
    for kl in (3.0, 12.0, 6.0):
        coefficient = step(coefficient, kl)
        seen.append(float(coefficient))
    np.testing.assert_allclose(seen, [0.198976, 0.19999476, 0.19999476], atol=1e-7)


def test_the_kl_coefficient_moves_towards_the_target_and_no_faster_than_a_fifth():
    def move(kl):
        settings = {"target": 0.1, "num_samples": 50, "horizon": 100}
        return float(jrl.adaptive_kl_coefficient(0.4, kl, **settings))

    moved = [move(kl) for kl in (0.0, 0.05, 0.099, 0.1, 0.101, 0.3, 9.0)]
    assert moved == sorted(moved)
    np.testing.assert_allclose([moved[0], moved[3], moved[-1]], [0.36, 0.4, 0.44], rtol=1e-6)


def test_the_entropy_coefficient_walks_and_is_withdrawn_above_the_target():
    coefficient, expected = np.asarray(0.008), 0.008
    step = jax.jit(jrl.adaptive_entropy_coefficient)
    for entropy in (0.3, 0.3, 0.3, 0.2, 0.1, 0.1, 0.25, 0.05):
        coefficient, applied = step(coefficient, entropy)
        expected, now = oracles.adaptive_entropy_coefficient(expected, entropy)
        np.testing.assert_allclose([coefficient, applied], [expected, now], atol=1e-8)
        assert (float(applied) == 0) == (entropy > 0.2)


def test_coefficients_carry_no_gradient():
    settings = {"target": 6, "num_samples": 256, "horizon": 1e4}
    slope = jax.jit(jax.grad(lambda kl: jrl.adaptive_kl_coefficient(0.2, kl, **settings)))(5.9)
    assert slope == 0
    assert jax.jit(jax.grad(lambda c: jrl.adaptive_entropy_coefficient(c, 0.1)[1]))(0.1) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jrl.adaptive_kl_coefficient(0.1, 1.0, target=0, num_samples=1, horizon=1),
            "target=0 must be positive",
        ),
        (
            lambda: jrl.adaptive_kl_coefficient(0.1, 1.0, target=1, num_samples=1, horizon=-1),
            "horizon=-1 must be positive",
        ),
        (lambda: jrl.adaptive_entropy_coefficient(0.1, 1.0, step=-1), "step=-1 cannot be negative"),
        (lambda: jrl.adaptive_entropy_coefficient(0.1, 1.0, low=2), "low=2 must not be above high"),
        (lambda: jrl.bounded_value(jnp.zeros(2), low=1, high=1), "low=1 must be below high=1"),
        (
            lambda: jrl.overlong_penalty(jnp.ones(2), max_length=3, buffer=1, floor=0.5),
            "floor=0.5 must not be positive",
        ),
        (
            lambda: inspect.unwrap(jrl.overlong_filter)(jnp.ones((2, 3)), jnp.ones(3)),
            r"truncated has shape \(3,\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_a_bounded_value_stays_inside_rises_and_has_its_slope():
    x = np.linspace(-50, 50, 101)
    values = jitted.bounded_value(x, low=-1.0, high=2.0)
    assert np.all(np.diff(values) > 0) and values.min() > -1 and values.max() < 2
    np.testing.assert_allclose(values + values[::-1], np.ones(101), atol=1e-5)
    with jax.enable_x64(True):
        call = lambda x: jrl.bounded_value(x, low=-1.0, high=2.0)  # noqa: E731 - with its bounds
        check_grads(jax.jit(call), (np.linspace(-3.0, 3, 7),), order=2)
        assert call(np.zeros(1)).dtype == jnp.float64
    assert jitted.bounded_value(np.zeros(1, jnp.bfloat16), low=0, high=1).dtype == np.float32


def test_what_the_filter_takes_out_counts_nowhere():
    truncated = np.array([1, 0, 0, 1, 1])
    mask = jitted.overlong_filter(MASK, truncated)
    np.testing.assert_array_equal(mask, MASK & (np.array([0, 1, 1, 0, 0])[:, None] == 1))
    loss = np.asarray(np.random.default_rng(0).normal(size=MASK.shape))
    np.testing.assert_allclose(jitted.aggregate(loss, mask), loss[1:3][MASK[1:3]].mean(), rtol=1e-5)
    row = jitted.overlong_filter(MASK[1], np.asarray(True))
    assert row.shape == MASK[1].shape and not np.any(row)


def test_without_a_floor_the_penalty_falls_on():
    lengths = np.arange(0, 40)
    paper = jitted.overlong_penalty(lengths, max_length=20, buffer=5)
    verl = jitted.overlong_penalty(lengths, max_length=20, buffer=5, floor=None)
    np.testing.assert_allclose(paper[:21], verl[:21])
    np.testing.assert_allclose(verl[20:], -1 - np.arange(20) / 5, rtol=1e-6)
    assert np.all(paper[20:] == -1)
