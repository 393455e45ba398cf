"""Masks without the samples that the sampler drew too far from the trainer's policy."""

from typing import Literal, get_args

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.mismatch.weights import lengths, log_ratio, mismatch_weights, outside, weight_range

RejectionKind = Literal["k2", "k3"]
RejectionOver = Literal["token", "sum", "mean", "max"]


def geometric_rejection_mask(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    low: Number | None,
    high: Number | None,
) -> Bool[Array, "*batch time"]:
    """The mask without the sequences whose weight per token leaves a range.

        a sequence stays if low <= exp(mean_t log w_t) <= high,    w = trainer over sampler

    **The range is one of w.** verl computes the same with ``k1 = -log w`` and bounds that, so its
    thresholds are those of sampler over trainer: its (a, b) is ``low=1/b, high=1/a`` here. Its
    preset of 0.999 to 1.001 is, to a millionth, the same both ways.

    With fewer true tokens, a loss that counts its own tokens has another denominator.

    Args:
      logprobs: of the sampled tokens as the trainer computes them, in nats; no gradient.
      behaviour_logprobs: the same as the sampler gave them; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      low: the least geometric mean that is kept; None is off.
      high: the greatest; None is off.

    Returns:
      A boolean mask, false wherever `mask` is.

    Raises:
      ValueError: if the range is empty or negative.

    References:
      verl, "Rollout correction", geometric rejection.
      https://verl.readthedocs.io/en/latest/algo/rollout_corr_math.html

    Examples:
      >>> import jax.numpy as jnp
      >>> log_weights = jnp.array([[0.1, 0.5], [0.1, -0.2]])
      >>> mask = jnp.array([[1, 1], [1, 1]])
      >>> geometric_rejection_mask(log_weights, 0 * log_weights, mask, low=0.8, high=1.25).tolist()
      [[False, False], [True, True]]
    """
    low, high = weight_range(low, high)
    geometric = mismatch_weights(
        logprobs, behaviour_logprobs, mask, level="geometric", max_log_weight=None
    )
    _, mask = log_ratio(logprobs, behaviour_logprobs, mask)
    return mask & ~outside(geometric, low, high)


def divergence_rejection_mask(
    logprobs: Float[ArrayLike, "*batch time"],
    behaviour_logprobs: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    kind: RejectionKind = "k3",
    over: RejectionOver = "mean",
    bound: Number,
    max_log_weight: Number | None = 20.0,
) -> Bool[Array, "*batch time"]:
    """The mask without the tokens or sequences whose divergence exceeds a bound.

    With w = trainer over sampler, the divergence of a token is

    | kind | value | estimates |
    |---|---|---|
    | ``k2`` | ``log(w)^2 / 2`` | KL(sampler ‖ trainer), to second order |
    | ``k3`` | ``w - 1 - log w`` | KL(sampler ‖ trainer), without bias and never negative |

    and what is compared with the bound is, with `over`, the value of each ``token`` (which then
    goes alone) or the ``sum``, ``mean`` or ``max`` over each sequence (which goes as a whole).

    Args:
      logprobs: of the sampled tokens as the trainer computes them, in nats; no gradient.
      behaviour_logprobs: the same as the sampler gave them; no gradient.
      mask: true on sampled tokens. A row is one sequence.
      kind: the estimator.
      over: what is bounded.
      bound: the greatest value that is kept, in nats. For the mean of k3, verl has 0.001 to 0.01.
      max_log_weight: ``log w`` is clamped to plus or minus this first, so that probabilities that
        vanish under one policy are far, and not undefined; None is off.

    Returns:
      A boolean mask, false wherever `mask` is.

    Raises:
      ValueError: if `kind` or `over` is unknown or `bound` negative.

    References:
      As for `geometric_rejection_mask`.

    Examples:
      >>> import jax.numpy as jnp
      >>> log_weights = jnp.array([[0.1, 1.0], [0.1, -0.2]])
      >>> arrays = (log_weights, 0 * log_weights, jnp.ones((2, 2)))
      >>> divergence_rejection_mask(*arrays, over="mean", bound=0.1).tolist()
      [[False, False], [True, True]]
      >>> divergence_rejection_mask(*arrays, over="token", bound=0.1).tolist()
      [[True, False], [True, True]]
    """
    if kind not in get_args(RejectionKind):
        raise ValueError(f"kind={kind!r} is neither 'k2' nor 'k3'.")
    if over not in get_args(RejectionOver):
        choices = ", ".join(get_args(RejectionOver))
        raise ValueError(f"over={over!r} is not a level of a divergence bound: choose {choices}.")
    bound = settings.number("bound", bound, "is a divergence and cannot be negative.", at_least=0)
    max_log_weight = settings.optional_distance("max_log_weight", max_log_weight)
    log_weights, mask = log_ratio(logprobs, behaviour_logprobs, mask)
    if max_log_weight is not None:
        log_weights = jnp.clip(log_weights, -max_log_weight, max_log_weight)
    # 0 where the mask is false, as the log-weights are.
    divergence = log_weights**2 / 2 if kind == "k2" else jnp.expm1(log_weights) - log_weights
    if over in ("sum", "mean"):
        divergence = jnp.sum(divergence, axis=-1, keepdims=True)
        if over == "mean":
            divergence = divergence / lengths(mask, divergence)
    elif over == "max":
        divergence = jnp.max(divergence, axis=-1, keepdims=True, initial=0)
    return mask & ~outside(jnp.broadcast_to(divergence, mask.shape), None, bound)
