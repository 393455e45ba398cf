"""KL estimators and entropy: vectors, slow loops, and exact expectations on a small vocabulary."""

import inspect
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import MASK, batch, numpy_batch
from jax.test_util import check_grads

import jrl

LOGPROBS, REFERENCE = jnp.array([-1.0, -2, -0.5, -3]), jnp.array([-1.2, -1.5, -0.5, -2])
K1, K2, K3 = [0.2, -0.5, 0, -1], [0.02, 0.125, 0, 0.5], [0.018731, 0.148721, 0, 0.718282]
SLOPE_K3 = [0.181269, -0.648721, 0, -1.718282]


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", K1, [1, 1, 1, 1]),
        ("k2", K2, K1),
        ("k3", K3, SLOPE_K3),
        ("abs", np.abs(K1), None),
        ("k1+", K1, K1),
        ("k3+", K3, K1),
        ("abs+", np.abs(K1), K1),
    ],
)
def test_vector_kl_1(kind, value, slope):
    def total(logprobs):
        return jnp.sum(jrl.kl_estimate(logprobs, REFERENCE, kind=kind))

    np.testing.assert_allclose(jrl.kl_estimate(LOGPROBS, REFERENCE, kind=kind), value, atol=1e-6)
    if slope is not None:
        np.testing.assert_allclose(jax.grad(total)(LOGPROBS), slope, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
@pytest.mark.parametrize("masked", [True, False])
def test_kl_oracle(kind, masked):
    b = numpy_batch(0)
    log_ratio = b["logprobs"] - b["ref_logprobs"]
    tokens = [[oracles.kl_token(d, kind) for d in row] for row in log_ratio]
    values, slopes = np.moveaxis(np.array(tokens), -1, 0)
    chosen = MASK if masked else np.ones_like(MASK)
    with jax.enable_x64(True):
        logprobs, reference = jnp.asarray(b["logprobs"]), jnp.asarray(b["ref_logprobs"])
        mask = jnp.asarray(MASK) if masked else None
        result = jrl.kl_estimate(logprobs, reference, mask, kind=kind)
        np.testing.assert_allclose(result, np.where(chosen, values, 0), rtol=1e-11, atol=1e-15)
        slope = jax.grad(lambda x: jnp.sum(jrl.kl_estimate(x, reference, mask, kind=kind)))
        expected = np.where(chosen, slopes, 0)
        np.testing.assert_allclose(slope(logprobs), expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_gradients_by_finite_differences(kind):
    with jax.enable_x64(True):
        b = batch(1, dtype=jnp.float64)
        call = lambda x: jrl.kl_estimate(x, b["ref_logprobs"], b["mask"], kind=kind)  # noqa: E731 - a call with one free argument
        check_grads(call, (b["logprobs"],), 1)


def policies():
    """Log-probabilities of a policy (from its logits) and of a reference, over five tokens."""
    draw = np.random.default_rng(3)
    logits = jnp.asarray(draw.normal(0, 1, 5))
    return logits, jax.nn.log_softmax(jnp.asarray(draw.normal(0, 1, 5)))


def test_k1_and_k3_have_the_divergence_as_their_mean():
    with jax.enable_x64(True):
        logits, reference = policies()
        logprobs = jax.nn.log_softmax(logits)
        divergence = np.sum(np.exp(logprobs) * (logprobs - reference))
        for kind in ("k1", "k3", "k1+", "k3+"):
            mean = np.sum(np.exp(logprobs) * jrl.kl_estimate(logprobs, reference, kind=kind))
            np.testing.assert_allclose(mean, divergence, rtol=1e-12)


def test_what_each_estimator_descends_on_average():
    with jax.enable_x64(True):
        logits, reference = policies()
        sampling = jax.lax.stop_gradient(jax.nn.softmax(logits))

        def expected_slope(kind):
            def loss(logits):
                logprobs = jax.nn.log_softmax(logits)
                return jnp.sum(sampling * jrl.kl_estimate(logprobs, reference, kind=kind))

            return jax.grad(loss)(logits)

        def forward(logits):
            logprobs = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

        def backward(logits):
            return jnp.sum(jnp.exp(reference) * (reference - jax.nn.log_softmax(logits)))

        for kind in ("k2", "k1+", "k3+", "abs+"):
            np.testing.assert_allclose(expected_slope(kind), jax.grad(forward)(logits), atol=1e-12)
        np.testing.assert_allclose(expected_slope("k3"), jax.grad(backward)(logits), atol=1e-12)
        np.testing.assert_allclose(expected_slope("k1"), np.zeros(5), atol=1e-12)


def test_k3_is_never_negative_and_keeps_its_digits_near_zero():
    small = jnp.array([1e-4, -1e-4, 1e-3, 0.0], jnp.float32)
    estimate = jrl.kl_estimate(small, jnp.zeros(4), kind="k3")
    assert np.all(estimate >= 0)
    # Computed as exp(-d) + d - 1 in float32 the first two would be off by their whole size.
    np.testing.assert_allclose(estimate, small**2 / 2, rtol=5e-2, atol=0)


@pytest.mark.parametrize("kind", get_args(jrl.KLEstimator))
def test_the_log_ratio_is_clamped_as_in_the_policy_losses(kind):
    default = inspect.signature(jrl.kl_estimate).parameters["max_log_ratio"].default
    assert default == inspect.signature(jrl.ppo_loss).parameters["max_log_ratio"].default
    far, near, zero = jnp.array([-100.0, 100.0]), jnp.array([-20.0, 20.0]), jnp.zeros(2)
    total = lambda x: (jnp.sum(y := jrl.kl_estimate(x, zero, kind=kind)), y)  # noqa: E731 - a sum and its terms
    slope, estimate = jax.grad(total, has_aux=True)(far)
    assert np.all(np.isfinite(estimate))
    np.testing.assert_array_equal(estimate, jrl.kl_estimate(near, zero, kind=kind))
    np.testing.assert_array_equal(slope, far if kind.endswith("+") else zero)


def test_the_clamps_can_be_off_and_narrower():
    far, zero = jnp.array([-30.0, 30.0]), jnp.zeros(2)
    off = {"max_log_ratio": None}
    np.testing.assert_allclose(jrl.kl_estimate(far, zero, kind="k1", **off), far)
    free = jrl.kl_estimate(far, zero, kind="k3", **off)
    np.testing.assert_allclose(free, [np.exp(30) - 31, np.exp(-30) + 29], rtol=1e-5)
    near = jrl.kl_estimate(far, zero, kind="k3", max_log_ratio=2)
    np.testing.assert_allclose(near, [np.exp(2) - 3, np.exp(-2) + 1], rtol=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
def test_a_clamp_stops_the_gradient_but_not_one_that_is_handed_through(kind):
    def bounded(logprobs):
        return jrl.kl_estimate(logprobs, jnp.zeros(2), kind=kind, max_log_ratio=20, max_value=10)

    far = jnp.array([-30.0, 30.0])
    expected = [-10, 10] if kind.startswith("k1") else [10, 10]
    np.testing.assert_allclose(bounded(far), expected)
    slope = jax.grad(lambda x: jnp.sum(bounded(x)))(far)
    np.testing.assert_allclose(slope, far if kind.endswith("+") else [0, 0])


@pytest.mark.parametrize("clamp", ["max_log_ratio", "max_value"])
def test_at_a_clamp_the_gradient_is_whole(clamp):
    at = jnp.array([-2.0, 2.0])
    slope = jax.grad(lambda x: jnp.sum(jrl.kl_estimate(x, 0 * at, kind="k1", **{clamp: 2.0})))(at)
    np.testing.assert_array_equal(slope, [1, 1])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"])
def test_the_reference_has_no_gradient(kind):
    slope = jax.grad(lambda r: jnp.sum(jrl.kl_estimate(LOGPROBS, r, kind=kind)))(REFERENCE)
    np.testing.assert_array_equal(slope, np.zeros(4))


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+"])
def test_a_token_of_probability_0_has_a_value_and_no_gradient(kind):
    def bounded(logprobs):
        return jrl.kl_estimate(logprobs, jnp.zeros(1), kind=kind, max_log_ratio=20, max_value=10)

    never = jnp.array([-jnp.inf])
    np.testing.assert_allclose(bounded(never), -10 if kind == "k1+" else 10)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(bounded(x)))(never), [0])


def test_entropy_oracle():
    logits = numpy_batch(4)["logits"]
    expected = [[oracles.entropy(token) for token in row] for row in logits]
    with jax.enable_x64(True):
        array = jnp.asarray(logits)
        entropy = jax.jit(jrl.entropy_from_logits)
        np.testing.assert_allclose(entropy(array), expected, rtol=1e-11)
        masked = entropy(array, jnp.asarray(MASK))
        np.testing.assert_allclose(masked, np.where(MASK, expected, 0), rtol=1e-11)
        check_grads(entropy, (array[:2, :3],), order=2)


def test_entropy_where_tokens_are_impossible():
    logits = jnp.array([[1.0, 2.0, -jnp.inf], [3.0, -jnp.inf, -jnp.inf], [0.0, -300.0, 300.0]])
    expected = [oracles.entropy([1, 2]), 0, 0]
    np.testing.assert_allclose(jrl.entropy_from_logits(logits), expected, atol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(jrl.entropy_from_logits(x)))(logits)
    pair = jax.grad(lambda x: jrl.entropy_from_logits(x))(jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(slope, [[*pair, 0], [0, 0, 0], [0, 0, 0]], atol=1e-6)


def test_entropy_of_uniform_and_shifted_logits():
    uniform = jnp.zeros((2, 5))
    np.testing.assert_allclose(jrl.entropy_from_logits(uniform), np.full(2, np.log(5)), rtol=1e-6)
    shifted = jrl.entropy_from_logits(jnp.array([1e4, 1e4 + 1]))
    np.testing.assert_allclose(shifted, oracles.entropy([0, 1]), rtol=1e-6)
