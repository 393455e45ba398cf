"""Distillation: TRL's recorded losses, derivatives, teachers that are equal or near."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.test_util import check_grads
from places import ROOT

import jrl

TRL = json.loads((ROOT / "tests/vectors/trl/distillation.json").read_text())
ARRAYS = {name: np.array(values) for name, values in TRL["arrays"].items()}
LOGITS, TEACHER = ARRAYS["logits"], ARRAYS["teacher_logits"]
BETAS = (0.0, 0.1, 0.5, 1.0)


def assert_equals_trl(function, recorded):
    """Values, and the gradients of their weighted sum."""

    def total(logits):
        values = function(logits)
        return ARRAYS["weights"] @ values, values

    with jax.enable_x64(True):
        gradient, values = jax.jit(jax.grad(total, has_aux=True))(LOGITS)
    np.testing.assert_allclose(values, recorded["values"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(gradient, recorded["gradients"]["logits"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("beta", BETAS)
def test_jsd_from_logits_equals_trl(beta):
    function = functools.partial(
        jrl.jsd_from_logits, teacher_logits=TEACHER, beta=beta, chunk_size=3
    )
    assert_equals_trl(function, TRL["jsd"][str(beta)])


def top_k_of(logits, k=TRL["k"], beta=1.0):
    """The divergence on the teacher's top k, from the policy's logits."""
    teacher, places = jax.lax.top_k(jax.nn.log_softmax(TEACHER), k)
    policy = jnp.take_along_axis(jax.nn.log_softmax(logits), places, axis=-1)
    return jrl.top_k_divergence(policy, teacher, beta=beta)


@pytest.mark.parametrize("beta", BETAS)
def test_top_k_divergence_equals_trl_with_its_tail(beta):
    assert_equals_trl(functools.partial(top_k_of, beta=beta), TRL["top_k"][str(beta)])


def test_distillation_advantages_have_the_gradient_of_trl():
    """TRL's loss of the sampled token has the advantage as a constant factor."""

    def loss(logits):
        logprobs, teacher = (
            jrl.logprobs_from_logits(z, ARRAYS["tokens"]) for z in (logits, TEACHER)
        )
        return -jrl.distillation_advantages(logprobs, teacher, np.ones(4)) * logprobs

    assert_equals_trl(loss, TRL["sampled"])


def test_distillation_baseline_keeps_the_expected_gradient():
    """Over all tokens the advantages weigh log-probabilities as the reverse KL does, and with the
    baseline their mean is 0."""
    with jax.enable_x64(True):
        logits, teacher = (jax.nn.log_softmax(z[0]) for z in (LOGITS, TEACHER))
        kl = jrl.kl_from_logits(logits, teacher)
        slope = jax.grad(jrl.kl_from_logits)(logits, teacher)
        for baseline in (None, jnp.full(7, kl)):
            advantages = jrl.distillation_advantages(logits, teacher, np.ones(7), kl=baseline)
            expected = jax.grad(
                lambda z, a=advantages: jnp.exp(logits) @ (a * jax.nn.log_softmax(z))
            )(logits)
            np.testing.assert_allclose(-expected, slope, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(jnp.exp(logits) @ advantages, 0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_top_k_divergence_finite_differences(beta):
    with jax.enable_x64(True):
        call = jax.jit(functools.partial(top_k_of, beta=beta))
        check_grads(call, (LOGITS,), order=2)


def test_top_k_divergence_holds_weights_and_log_ratios_constant():
    def events(logits):
        """Log-probabilities of the teacher's top 3 and of the rest."""
        top = jnp.take_along_axis(jax.nn.log_softmax(logits), places, axis=-1)
        rest = jnp.log(-jnp.expm1(jax.nn.logsumexp(top, axis=-1, keepdims=True)))
        return jnp.concatenate([top, rest], axis=-1)

    def stopped(logits):
        policy = events(logits)
        weights = jnp.exp(policy) * (policy - events(TEACHER))
        return jnp.sum(jax.lax.stop_gradient(weights) * policy)

    def biased(logits):
        policy, teacher = (events(z)[:, :3] for z in (logits, TEACHER))
        return jnp.sum(jnp.exp(policy) * (policy - teacher))

    @jax.jit
    def slopes(logits, teacher):
        ours = jax.grad(lambda z: jnp.sum(top_k_of(z)))
        return [grad(logits) for grad in (ours, jax.grad(stopped))] + [
            grad(teacher) for grad in (ours, jax.grad(biased))
        ]

    with jax.enable_x64(True):
        places = jax.device_get(jax.lax.top_k(TEACHER, 3)[1])
        actual, wanted, at_rest, collapsing = jax.device_get(slopes(LOGITS, TEACHER))
    np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-11)
    # A policy equal to the teacher is at rest, and without the rest loses the teacher's tokens.
    np.testing.assert_allclose(at_rest, 0, atol=1e-12)
    assert np.all(np.take_along_axis(collapsing, places, axis=-1)[:, 0] > 0.01)


def test_top_k_divergence_is_below_the_whole_and_grows_with_k():
    @jax.jit
    def rising(logits, teacher):
        return [
            [*(top_k_of(logits, k, beta) for k in (1, 3, 6)), whole(logits, teacher, beta=beta)]
            for beta in BETAS
        ]

    whole = jrl.jsd_from_logits
    with jax.enable_x64(True):
        for divergences in jax.device_get(rising(LOGITS, TEACHER)):
            assert np.all(np.diff(divergences, axis=0) > -1e-12)
            # One token is left to the rest of six.
            np.testing.assert_allclose(divergences[-2], divergences[-1], rtol=1e-9)


def test_top_k_divergence_of_rounded_probabilities():
    """Sums above 1 leave the rest its least probability, and a gradient that is finite."""
    policy, teacher = (
        np.log(np.float32([[0.7, 0.31], [0.5, 0.4]])),
        np.log([[0.9, 0.1], [0.8, 0.21]]),
    )
    for beta in BETAS:
        total = lambda x, b=beta: jnp.sum(jrl.top_k_divergence(x, teacher, beta=b))  # noqa: E731 - of the loop
        value, gradient = jax.jit(jax.value_and_grad(total))(policy)
        assert 0 < value < np.inf and np.all(np.isfinite(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("beta", BETAS)
def test_equal_teacher_gives_exactly_zero(beta, dtype):
    logits = jnp.asarray(3 * LOGITS, dtype)
    for function in (
        functools.partial(jrl.jsd_from_logits, chunk_size=2, beta=beta),
        lambda z, t: jrl.top_k_divergence(
            jax.nn.log_softmax(z)[:, :3], jax.nn.log_softmax(t)[:, :3], beta=beta
        ),
    ):
        # Both as inputs: the compiler rounds the exponentials of a constant in another way.
        step = jax.jit(jax.value_and_grad(lambda z, t, f=function: jnp.sum(f(z, t))))
        value, gradient = step(logits, logits)
        assert value == 0 and not np.any(gradient)


def test_jsd_from_logits_of_near_policies():
    draw = np.random.default_rng(2)
    for size in (1e-2, 1e-3):
        near = LOGITS + size * draw.normal(size=LOGITS.shape)
        for beta in (0.1, 0.5, 0.9):
            exact = [oracles.jsd(*z, beta)[0] for z in zip(LOGITS, near, strict=True)]
            arrays = (np.asarray(x, np.float32) for x in (LOGITS, near))
            result = jax.jit(functools.partial(jrl.jsd_from_logits, beta=beta))(*arrays)
            # A sum of p log(p / m) in float32 would be off by 1e-7, above the smallest of these.
            np.testing.assert_allclose(result, exact, rtol=2e-2)


def test_jsd_from_logits_of_distant_policies_is_bounded():
    far = np.array([[-300.0, 300.0, 0.0], [0.0, -np.inf, -np.inf]])
    other = np.array([[300.0, -300.0, 0.0], [-np.inf, 0.0, 0.0]])
    value, gradient = jax.value_and_grad(lambda z: jnp.sum(jrl.jsd_from_logits(z, other)))(far)
    np.testing.assert_allclose(value, 2 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_divergences_have_no_gradient_by_the_teacher():
    top = jax.nn.log_softmax(np.float32(TEACHER))[:, :3]
    for beta in (0.0, 0.5, 1.0):
        for function, policy, teacher in (
            (jrl.jsd_from_logits, np.float32(LOGITS), np.float32(TEACHER)),
            (jrl.top_k_divergence, top - 0.1, top),
        ):
            total = lambda t, f=function, z=policy, b=beta: jnp.sum(f(z, t, beta=b))  # noqa: E731 - of the loop
            assert not np.any(jax.jit(jax.grad(total))(teacher))
