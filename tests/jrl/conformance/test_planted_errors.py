"""Planted errors, each caught by the case or rule that names it."""

import jax
import jax.numpy as jnp
import pytest
from planted import PLANTED, RIGHT

from jrl.conformance import check


def failing(function, quantity, framework="numpy"):
    report = check(function, quantity, framework)
    return {finding.name for finding in (*report.cases, *report.rules) if finding.fails}


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # of what is wrong
@pytest.mark.parametrize(("wrong", "quantity", "named"), PLANTED)
def test_planted_error_is_named(wrong, quantity, named):
    assert named in failing(wrong, quantity)


@pytest.mark.parametrize("quantity", RIGHT)
def test_right_function_passes(quantity):
    report = check(RIGHT[quantity], quantity, "numpy")
    # Its masks are Boolean and its values under them finite.
    assert {f.name for f in (*report.cases, *report.rules) if f.fails} == set()
    assert report.verdict in ("agrees", "another convention")
    assert sum(finding.state == "holds" for finding in report.cases) >= 5


def surrogate(logprobs, old_logprobs, advantages, mask):
    ratio = jnp.exp(logprobs - old_logprobs)
    losses = jnp.maximum(-advantages * ratio, -advantages * jnp.clip(ratio, 0.8, 1.2))
    return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)


def constants_detached(logprobs, old_logprobs, advantages, mask):
    old, advantages = jax.lax.stop_gradient((old_logprobs, advantages))
    return surrogate(logprobs, old, advantages, mask)


def detached_ratio(logprobs, old_logprobs, advantages, mask):
    return surrogate(logprobs, old_logprobs, advantages, mask) - jnp.sum(
        jnp.where(mask, logprobs - jax.lax.stop_gradient(logprobs), 0)
    )


@pytest.mark.slow
def test_gradient_errors_are_named():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        right = failing(constants_detached, "ppo_loss", "jax")
        attached = failing(surrogate, "ppo_loss", "jax")
        wrong = failing(detached_ratio, "ppo_loss", "jax")
    assert not right & {"constants", "CLIP-1 A=+1 eps .2/.2"}
    assert attached - right == {"constants"}
    assert "CLIP-1 A=+1 eps .2/.2" in wrong
