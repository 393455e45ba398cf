"""KL divergence between two policies, estimated from the sampled tokens."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, as_floats, as_mask, check_shapes, clip, zero_masked

KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


def kl_estimate(
    logprobs: Float[ArrayLike, "*batch time"],
    reference_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"] | None = None,
    *,
    kind: KLEstimator = "k3",
    max_log_ratio: Number | None = 20.0,
    max_value: Number | None = None,
) -> Float[Array, "*batch time"]:
    """Per-token estimate of KL(policy || reference) from sampled tokens.

    With ``d = logprobs - reference_logprobs`` on tokens sampled from the policy:

    | kind | value | as a loss, its expected gradient is |
    |---|---|---|
    | ``k1`` | ``d`` | zero: use it in the reward, not in the loss |
    | ``k2`` | ``d^2 / 2`` | the gradient of KL(policy ‖ reference) |
    | ``k3`` | ``exp(-d) + d - 1`` | the gradient of KL(reference ‖ policy) |
    | ``abs`` | ``|d|`` | of no divergence; it measures distance |
    | ``k1+`` | ``d`` | the gradient of ``k2`` (straight-through) |
    | ``k3+`` | ``exp(-d) + d - 1`` | the gradient of ``k2`` (straight-through) |
    | ``abs+`` | ``|d|`` | the gradient of ``k2`` (straight-through) |

    k1 and k3 are unbiased estimates of the KL divergence; k2 equals it to second order. k2 and k3
    are never negative. verl calls k1 ``kl``, k2 ``mse`` and k3 ``low_var_kl``.

    Args:
      logprobs: of the sampled tokens under the policy, in nats.
      reference_logprobs: the same under the reference; no gradient.
      mask: true on sampled tokens. Estimates are 0 where it is false (gradient stopped). None
        estimates everywhere.
      kind: the estimator.
      max_log_ratio: clamps d to plus or minus this many nats first, as the policy losses do. For a
        token whose probability has collapsed, k3 is about ``exp(-d)``: infinite in float32 from 89
        nats on, 5e8 at 20. None disables it. (verl has 20 for k3 and no clamp for the others, TRL
        and OpenRLHF have none.)
      max_value: clamps the estimate to plus or minus this; None disables it. (verl for k3, OpenRLHF
        for all: 10.) A clamped token has gradient 0, so a loss does not penalise the most
        divergent tokens. k1+, k3+ and abs+ have gradient d despite clamps, as in both libraries.

    Returns:
      One estimate per token, in nats. In a loss, `aggregate` it with the policy loss's mask and
      denominators.

    Raises:
      ValueError: if `kind` is unknown or a clamp is negative.

    References:
      Schulman, "Approximating KL divergence", 2020. http://joschu.net/blog/kl-approx.html

    Examples:
      >>> logprobs, reference = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
      >>> kl_estimate(logprobs, reference, kind="k2").tolist()
      [0.125, 0.5]
    """
    settings.choice("kind", kind, KLEstimator, "an estimator of KL")
    max_log_ratio = settings.optional_distance("max_log_ratio", max_log_ratio)
    max_value = settings.optional_distance("max_value", max_value)
    check_shapes(logprobs=logprobs, reference_logprobs=reference_logprobs)
    logprobs, reference_logprobs = as_floats(logprobs, reference_logprobs)
    if mask is not None:
        check_shapes(logprobs=logprobs, mask=mask)
        mask = as_mask(mask)
        logprobs = zero_masked(logprobs, mask)
        reference_logprobs = zero_masked(reference_logprobs, mask)
    difference = logprobs - jax.lax.stop_gradient(reference_logprobs)
    bounded = difference if max_log_ratio is None else clip(difference, max_log_ratio)
    estimate = _estimate(bounded, kind.removesuffix("+"))
    if max_value is not None:
        estimate = clip(estimate, max_value)
    if kind.endswith("+"):
        # Straight-through: the slope adds 0 to the value. At probability 0 the gradient would be
        # infinite, and is set to 0. Not by the square, which overflows from 2e19 on.
        difference = zero_masked(difference, jnp.isfinite(difference))
        slope = jax.lax.stop_gradient(difference)
        estimate = slope * (difference - slope) + jax.lax.stop_gradient(estimate)
    return estimate


def _estimate(difference: Float[Array, "*batch time"], kind: str) -> Float[Array, "*batch time"]:
    """The estimate of `kind` ``k1``, ``k2``, ``k3`` or ``abs`` from the log-ratio."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        # By expm1: near d = 0 the estimate is d^2 / 2, far below the rounding error of exp(-d).
        return jnp.expm1(-difference) + difference
    # Not jnp.abs, whose derivative at 0 is 1: equal policies must have gradient 0.
    return difference * jnp.sign(difference)
