"""KL estimators and entropy: vectors, slow loops, and exact expectations on a small vocabulary."""

import functools
import inspect
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from compiled import jitted

import jrl

LOGPROBS, REFERENCE = np.array([-1.0, -2, -0.5, -3]), np.array([-1.2, -1.5, -0.5, -2])


KINDS = get_args(jrl.KLEstimator)
every_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def estimates(**settings):
    """Every estimator by its name, and the gradient of its sum, from one program."""

    @jax.jit
    def run(logprobs, reference, mask=None):
        def total(logprobs, kind):
            result = jrl.kl_estimate(logprobs, reference, mask, kind=kind, **settings)
            return jnp.sum(result), result

        slopes = {kind: jax.grad(total, has_aux=True)(logprobs, kind) for kind in KINDS}
        return {kind: (result, slope) for kind, (slope, result) in slopes.items()}

    return run


def log_softmax(x):
    return x - np.log(np.exp(x).sum())


def policies():
    """Log-probabilities of a policy (from its logits) and of a reference, over five tokens."""
    draw = np.random.default_rng(3)
    return draw.normal(0, 1, 5), log_softmax(draw.normal(0, 1, 5))


def test_kl_estimates_k1_and_k3_are_unbiased():
    logits, reference = policies()
    logprobs = log_softmax(logits)
    divergence = np.sum(np.exp(logprobs) * (logprobs - reference))
    with jax.enable_x64(True):
        result = jax.device_get(estimates()(logprobs, reference))
    for kind in ("k1", "k3", "k1+", "k3+"):
        mean = np.sum(np.exp(logprobs) * result[kind][0])
        np.testing.assert_allclose(mean, divergence, rtol=1e-12)


def test_kl_estimates_expected_gradients():
    logits, reference = policies()
    sampling = np.exp(log_softmax(logits))

    @jax.jit
    def slopes(logits):
        def expected(logits, kind):
            logprobs = jax.nn.log_softmax(logits)
            return jnp.sum(sampling * jrl.kl_estimate(logprobs, reference, kind=kind))

        def forward(logits):
            logprobs = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

        def backward(logits):
            return jnp.sum(np.exp(reference) * (reference - jax.nn.log_softmax(logits)))

        actual = {kind: jax.grad(expected)(logits, kind) for kind in KINDS}
        return actual, jax.grad(forward)(logits), jax.grad(backward)(logits)

    with jax.enable_x64(True):
        actual, forward, backward = jax.device_get(slopes(logits))
    for kind in ("k2", "k1+", "k3+", "abs+"):
        np.testing.assert_allclose(actual[kind], forward, atol=1e-12)
    np.testing.assert_allclose(actual["k3"], backward, atol=1e-12)
    np.testing.assert_allclose(actual["k1"], np.zeros(5), atol=1e-12)


def test_kl_k3_is_never_negative_near_zero():
    small = np.array([1e-4, -1e-4, 1e-3, 0.0], np.float32)
    estimate = jitted.kl_estimate(small, np.zeros(4), kind="k3")
    assert np.all(estimate >= 0)
    # Computed as exp(-d) + d - 1 in float32 the first two would be off by their whole size.
    np.testing.assert_allclose(estimate, small**2 / 2, rtol=5e-2, atol=0)


@every_kind
def test_kl_estimate_clamps_the_log_ratio(kind):
    default = inspect.signature(jrl.kl_estimate).parameters["max_log_ratio"].default
    assert default == inspect.signature(jrl.ppo_loss).parameters["max_log_ratio"].default
    far, near, zero = np.array([-100.0, 100.0]), np.array([-20.0, 20.0]), np.zeros(2)
    estimate, slope = estimates()(far, zero)[kind]
    chex.assert_tree_all_finite(estimate)
    np.testing.assert_array_equal(estimate, estimates()(near, zero)[kind][0])
    np.testing.assert_array_equal(slope, far if kind.endswith("+") else zero)


def test_kl_estimate_with_other_clamps():
    far, zero = np.array([-30.0, 30.0]), np.zeros(2)
    off = {"max_log_ratio": None}
    np.testing.assert_allclose(jitted.kl_estimate(far, zero, kind="k1", **off), far)
    free = jitted.kl_estimate(far, zero, kind="k3", **off)
    np.testing.assert_allclose(free, [np.exp(30) - 31, np.exp(-30) + 29], rtol=1e-5)
    near = jitted.kl_estimate(far, zero, kind="k3", max_log_ratio=2)
    np.testing.assert_allclose(near, [np.exp(2) - 3, np.exp(-2) + 1], rtol=1e-5)


@every_kind
def test_kl_estimate_clamp_stops_the_gradient(kind):
    far = np.array([-30.0, 30.0])
    result, slope = estimates(max_log_ratio=20, max_value=10)(far, np.zeros(2))[kind]
    np.testing.assert_allclose(result, [-10, 10] if kind.startswith("k1") else [10, 10])
    np.testing.assert_allclose(slope, far if kind.endswith("+") else [0, 0])


@pytest.mark.parametrize("clamp", ["max_log_ratio", "max_value"])
def test_kl_estimate_gradient_at_a_clamp(clamp):
    at = np.array([-2.0, 2.0])
    slope = jax.jit(
        jax.grad(lambda x: jnp.sum(jrl.kl_estimate(x, 0 * at, kind="k1", **{clamp: 2.0})))
    )(at)
    np.testing.assert_array_equal(slope, [1, 1])


@functools.cache
def slopes_by_the_reference():
    def total(reference, kind):
        return jnp.sum(jrl.kl_estimate(LOGPROBS, reference, kind=kind))

    return jax.jit(lambda x: {kind: jax.grad(total)(x, kind) for kind in KINDS})(REFERENCE)


@every_kind
def test_kl_estimate_reference_has_no_gradient(kind):
    np.testing.assert_array_equal(slopes_by_the_reference()[kind], np.zeros(4))


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+"])
def test_kl_estimate_of_probability_zero(kind):
    never = np.array([-np.inf, -np.inf])
    result, slope = estimates(max_log_ratio=20, max_value=10)(never, np.zeros(2))[kind]
    np.testing.assert_allclose(result, -10 if kind == "k1+" else 10)
    np.testing.assert_array_equal(slope, [0, 0])


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+"])
def test_kl_estimate_of_the_least_float(kind):
    least = np.full(2, np.finfo(np.float32).min)
    result, slope = estimates(max_log_ratio=20, max_value=10)(least, np.zeros(2))[kind]
    np.testing.assert_allclose(result, -10 if kind == "k1+" else 10)
    np.testing.assert_array_equal(slope, least)


def test_entropy_of_impossible_tokens():
    logits = np.array([[1.0, 2.0, -np.inf], [3.0, -np.inf, -np.inf], [0.0, -300.0, 300.0]])
    expected = [oracles.entropy([1, 2]), 0, 0]
    np.testing.assert_allclose(jitted.entropy_from_logits(logits), expected, atol=1e-6)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(jrl.entropy_from_logits(x))))(logits)
    pair = jax.jit(jax.grad(lambda x: jrl.entropy_from_logits(x)))(np.array([1.0, 2.0]))
    np.testing.assert_allclose(slope, [[*pair, 0], [0, 0, 0], [0, 0, 0]], atol=1e-6)


def test_entropy_of_uniform_and_shifted_logits():
    uniform = np.zeros((2, 5))
    np.testing.assert_allclose(
        jitted.entropy_from_logits(uniform), np.full(2, np.log(5)), rtol=1e-6
    )
    shifted = jitted.entropy_from_logits(np.array([1e4, 1e4 + 1]))
    np.testing.assert_allclose(shifted, oracles.entropy([0, 1]), rtol=1e-6)
