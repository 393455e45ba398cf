"""The covariance of advantage and log-probability, token by token.

The entropy of a policy falls where a likely token has a high advantage, that is, by the covariance
of the two. A handful of tokens carry most of it, and Clip-Cov and KL-Cov hold them back.
"""

import operator
from dataclasses import dataclass
from typing import Generic

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, as_mask, check_shapes, zero_masked
from jrl.losses.policy.order import count, floor_fraction
from jrl.losses.policy.tokens import Tokens, prepare
from jrl.losses.reduction import Leaf, Mean


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CovarianceStatistics(Generic[Leaf]):
    """The two means of a batch around which covariances are taken.

    Those of pieces add up with ``+``, and over devices with ``jax.lax.psum``.

    Attributes:
      advantages: their mean over the true tokens.
      logprobs: likewise.
    """

    advantages: Mean[Leaf]
    logprobs: Mean[Leaf]

    def __add__(self, other: "CovarianceStatistics[Leaf]") -> "CovarianceStatistics[Leaf]":
        return jax.tree.map(operator.add, self, other)


def covariance_statistics(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> CovarianceStatistics[Array]:
    """The means that `covariances` needs, for batches that are cut.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.

    Returns:
      The record, which adds up over pieces.

    References:
      As for `covariances`.

    Examples:
      >>> import jax.numpy as jnp
      >>> statistics = covariance_statistics(
      ...     jnp.array([-1.0, -3.0]), jnp.array([2.0, 0.0]), jnp.ones(2)
      ... )
      >>> float(statistics.advantages.value()), float(statistics.logprobs.value())
      (1.0, -2.0)
    """
    tokens = prepare(logprobs, logprobs, advantages, mask)
    return CovarianceStatistics(
        advantages=Mean.of(tokens.advantages, tokens.mask),
        logprobs=Mean.of(tokens.logprobs, tokens.mask),
    )


def covariances(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    statistics: CovarianceStatistics[Array] | None = None,
) -> Float[Array, "*batch time"]:
    """What each token adds to the covariance of advantage and log-probability.

        cov_t = (A_t - mean A) (logp_t - mean logp)

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      statistics: the means over the whole batch, of `covariance_statistics`. None takes them from
        the arrays given here, which must then be the **whole batch**.

    Returns:
      One number per token, without a gradient; 0 where the mask is false. Their mean is the
      covariance.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
      2025. https://arxiv.org/abs/2505.22617

    Examples:
      >>> import jax.numpy as jnp
      >>> logprobs, advantages = jnp.array([-1.0, -3.0, -9.0]), jnp.array([2.0, 0.0, 9.0])
      >>> covariances(logprobs, advantages, jnp.array([1, 1, 0])).tolist()
      [1.0, 1.0, 0.0]
    """
    if statistics is None:
        statistics = covariance_statistics(logprobs, advantages, mask)
    tokens = prepare(jax.lax.stop_gradient(jnp.asarray(logprobs)), logprobs, advantages, mask)
    mean_advantage, mean_logprob = (
        jax.lax.stop_gradient(mean.value()).astype(tokens.logprobs.dtype)
        for mean in (statistics.advantages, statistics.logprobs)
    )
    product = (tokens.advantages - mean_advantage) * (tokens.logprobs - mean_logprob)
    return zero_masked(product, tokens.mask)


def checked_fraction(fraction: Number) -> int | float:
    """A fraction of the batch, whose value decides what is compiled."""
    rule = "is a share of the tokens, from 0 to 1."
    return settings.static(
        "fraction", settings.number("fraction", fraction, rule, at_least=0, at_most=1)
    )


def number_chosen(mask: Bool[Array, "*batch time"], fraction: int | float) -> Array:
    """Number of tokens that a fraction of the batch is: at least one, unless it is 0."""
    number, _, _ = floor_fraction(fraction, count(mask))
    return number if fraction == 0 else jnp.maximum(number, 1)


def as_chosen(
    chosen: Shaped[ArrayLike, "*batch time"], tokens: Tokens
) -> Bool[Array, "*batch time"]:
    """A choice made by the caller, as a mask within the mask."""
    check_shapes(logprobs=tokens.logprobs, chosen=chosen)
    return as_mask(chosen) & tokens.mask
