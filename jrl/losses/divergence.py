"""KL divergence of a policy from another, estimated from the sampled tokens."""

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
    """Estimate of KL(policy || reference) from each sampled token.

    With ``d = logprobs - reference_logprobs`` on tokens sampled from the policy:

    | kind | value | as a loss, its expected gradient is |
    |---|---|---|
    | ``k1`` | ``d`` | zero: use it in the reward, never in the loss |
    | ``k2`` | ``d^2 / 2`` | that of KL(policy ‖ reference) |
    | ``k3`` | ``exp(-d) + d - 1`` | that of KL(reference ‖ policy) |
    | ``abs`` | ``|d|`` | of no divergence; a measure of distance |
    | ``k1+`` | ``d`` | that of ``k2``, straight through |
    | ``k3+`` | ``exp(-d) + d - 1`` | that of ``k2``, straight through |
    | ``abs+`` | ``|d|`` | that of ``k2``, straight through |

    k1 and k3 have the KL divergence as their mean, k2 only to second order; k2 and k3 are never
    negative. verl calls k1 ``kl``, k2 ``mse`` and k3 ``low_var_kl``.

    Args:
      logprobs: of the sampled tokens under the policy, in nats.
      reference_logprobs: the same under the reference; no gradient.
      mask: true on sampled tokens. If given, estimates are 0 where it is false, and what lies there
        reaches no gradient; None estimates everywhere.
      kind: the estimator.
      max_log_ratio: clamp d to plus or minus this many nats first, as the policy losses do: k3 of
        a token that the policy has nearly given up is ``exp(-d)``, which is infinite in float32
        from 89 nats on and 5e8 at 20. None is off. (verl has 20 for k3 and no clamp for the others,
        TRL and OpenRLHF have none.)
      max_value: clamp the estimate to plus or minus this; None is off. (verl for k3, OpenRLHF for
        all: 10.) Where a clamp acts, the gradient is 0, which lets the farthest tokens go free; but
        those of k1+, k3+ and abs+ are d whatever the clamps do to the value, as in both libraries.

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
    difference = logprobs - jax.lax.stop_gradient(reference_logprobs)
    if mask is not None:
        check_shapes(logprobs=logprobs, mask=mask)
        difference = zero_masked(difference, as_mask(mask))
    bounded = difference if max_log_ratio is None else clip(difference, max_log_ratio)
    estimate = _estimate(bounded, kind.removesuffix("+"))
    if max_value is not None:
        estimate = clip(estimate, max_value)
    if kind.endswith("+"):
        # Zero in value. A token of probability 0 has no finite slope, and gets none.
        slope = _estimate(zero_masked(difference, jnp.isfinite(difference)), "k2")
        estimate = slope - jax.lax.stop_gradient(slope) + jax.lax.stop_gradient(estimate)
    return estimate


def _estimate(difference: Float[Array, "*batch time"], kind: str) -> Float[Array, "*batch time"]:
    """One of the four plain estimators from the log-ratio."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    if kind == "k3":
        # exp(-d) - 1 by expm1: near d = 0 the estimate is d^2 / 2, far below the rounding of 1.
        return jnp.expm1(-difference) + difference
    # Not by jnp.abs, whose derivative at 0 is 1: equal policies are not pushed apart.
    return difference * jnp.sign(difference)
