"""Clip-Cov and KL-Cov: policy losses that restrain high-covariance tokens against entropy collapse.

The entropy of a policy falls with the covariance of advantage and log-probability, that is, where
likely tokens have a high advantage. A small fraction of the tokens contributes most of it.
"""

from dataclasses import dataclass
from typing import Generic, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, TokenMask, as_mask, check_shapes, num_true, zero_masked
from jrl.losses.policy.token_ratio import clipped
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    Tokens,
    clamped_log_ratio,
    floor_fraction,
    prepare,
    random_bits,
    reduce_surrogate,
    top_k_mask,
)
from jrl.losses.reduction import Additive, Aggregation, Denominators, Leaf, Mean

__all__ = [  # noqa: RUF022 - in reading order
    "covariances",
    "covariance_statistics",
    "CovarianceStatistics",
    "clip_cov_loss",
    "kl_cov_loss",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CovarianceStatistics(Additive, Generic[Leaf]):
    """Batch means of advantages and log-probabilities, around which covariances are taken.

    Records of micro-batches add up with ``+``, and over devices with ``jax.lax.psum``.

    Attributes:
      advantages: mean over the tokens in the mask.
      logprobs: likewise.
    """

    advantages: Mean[Leaf]
    logprobs: Mean[Leaf]


def covariance_statistics(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> CovarianceStatistics[Array]:
    """Means that `covariances` needs, for batches split into micro-batches.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.

    Returns:
      A record that adds up over micro-batches.

    References:
      As for `covariances`.

    Examples:
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
    """Contribution of each token to the covariance of advantage and log-probability.

        cov_t = (A_t - mean A) (logp_t - mean logp)

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      statistics: the means over the whole batch, from `covariance_statistics`. None computes them
        from these arrays, which must then be the **whole batch**.

    Returns:
      One number per token (gradient stopped); 0 where the mask is false. Their mean is the
      covariance.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
      2025. https://arxiv.org/abs/2505.22617

    Examples:
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
    """Checked fraction of the batch, from 0 to 1; static, as it decides what is compiled."""
    rule = "is a share of the tokens, from 0 to 1."
    return settings.static("fraction", fraction, rule, at_least=0, at_most=1)


def num_selected(mask: TokenMask, fraction: int | float) -> Array:
    """Number of tokens in a fraction of the batch: at least one, unless the fraction is 0."""
    k, _, _ = floor_fraction(fraction, num_true(mask))
    return k if fraction == 0 else jnp.maximum(k, 1)


def selection(chosen: Shaped[ArrayLike, "*batch time"], tokens: Tokens) -> TokenMask:
    """Mask of the tokens that the caller selected, restricted to the loss mask."""
    check_shapes(logprobs=tokens.logprobs, chosen=chosen)
    return as_mask(chosen) & tokens.mask


def clip_cov_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    key: Array | None = None,
    fraction: Number = 2e-4,
    low: Number = 1.0,
    high: Number = 5.0,
    clip_low: Bound = 1.0,
    clip_high: Bound = 1.0,
    chosen: Shaped[ArrayLike, "*batch time"] | None = None,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of Clip-Cov: PPO without the loss of a few tokens of high covariance.

    Candidates are the tokens that the ratio's bounds do not clip and whose covariance is strictly
    between `low` and `high`. ``max(1, floor(fraction N))`` of them are selected at random, or all
    if there are fewer, with N the number of tokens in the mask. Their loss, and so their gradient,
    is 0.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      key: of `jax.random`. The selection depends on it and on the order of the tokens in the mask,
        not on padding. Required unless `fraction` is 0 or 1, or `chosen` is given.
      fraction: fraction of the batch to select, from 0 (none) to 1 (all candidates); 2e-4 in the
        paper.
      low: lower limit of a candidate's covariance; 1 in the recipe.
      high: upper limit of it; 5 in the recipe.
      clip_low: as in `ppo_loss`; the recipe has bounds of 1, which rarely clip.
      clip_high: likewise.
      chosen: true on the tokens whose loss is set to 0, selected beforehand. None selects among the
        tokens of these arrays by their `covariances`, which is right for a **whole batch**: of each
        micro-batch at least one token would be selected, as in verl.
      max_log_ratio: as in `ppo_loss`; None disables the clamp.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, and ``cov_frac``, the fraction of selected tokens (verl
      reports it as ``pg_clipfrac``).

    Raises:
      ValueError: if a required `key` is missing, `fraction` is not in [0, 1], `low` is
        not below `high`, or a bound is negative; if the aggregation is unknown, or None with
        denominators.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
      2025. https://arxiv.org/abs/2505.22617

    Examples:
      >>> logprobs, advantages = jnp.array([-1.0, -4.0, -1.0]), jnp.array([2.0, 0.0, -2.0])
      >>> arrays = logprobs, logprobs, advantages, jnp.ones(3)
      >>> losses, _ = clip_cov_loss(*arrays, fraction=1, aggregation=None)
      >>> losses.tolist()
      [0.0, -0.0, 2.0]
      >>> _, metrics = clip_cov_loss(*arrays, key=jax.random.key(0), low=0.5)
      >>> float(metrics["cov_frac"].sum)
      1.0
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    low, high = settings.span(low, high, "no covariance is in between.")
    fraction = checked_fraction(fraction)
    if key is None and chosen is None and fraction not in (0, 1):
        raise ValueError(
            "key=None cannot select tokens at random: give one of jax.random.key(seed)."
        )
    surrogate, statistics = clipped(tokens, clip_low, clip_high, None, max_log_ratio)
    if chosen is None:
        k = num_selected(tokens.mask, fraction)
        covariance = covariances(tokens.logprobs, tokens.advantages, tokens.mask)
        unclipped = statistics["pg_clipfrac"] == 0
        candidates = tokens.mask & unclipped & (covariance > low) & (covariance < high)
        order = () if key is None else (random_bits(key, tokens.mask),)
        selected = top_k_mask(k, candidates, *order)
    else:
        selected = selection(chosen, tokens)
    surrogate = zero_masked(surrogate, ~selected)
    statistics = {**statistics, "cov_frac": selected.astype(surrogate.dtype)}
    return reduce_surrogate(
        clip_cov_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def kl_cov_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    fraction: Number = 2e-3,
    coefficient: Number = 1.0,
    chosen: Shaped[ArrayLike, "*batch time"] | None = None,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of KL-Cov: unclipped, with a KL penalty on the tokens of highest covariance.

        l = -A r + coefficient |logprobs - old_logprobs|    on the selected tokens
            -A r                                            elsewhere

    Selected are the ``max(1, floor(fraction N))`` tokens with the highest `covariances`, N the
    number of tokens in the mask; ties go to the earlier token. The gradient of the penalty is
    `coefficient` times the sign of the log-ratio, so the first on-policy step is
    REINFORCE.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      fraction: fraction of the batch to select, from 0 (none) to 1. The paper has 2e-3 for a model
        of 7B and 2e-4 for 32B; the latter is verl's default.
      coefficient: of the penalty: 1 in the recipe, 0.1 in verl's dataclass.
      chosen: true on the tokens to penalise, selected beforehand. None selects among the tokens of
        these arrays, which is right for a **whole batch**, see `clip_cov_loss`.
      max_log_ratio: as in `ppo_loss`, on the penalty as well; None disables the clamp.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, without the metrics of clips, as nothing is clipped, and
      with ``cov_frac``, the fraction of selected tokens.

    Raises:
      ValueError: if `fraction` is not in [0, 1] or `coefficient` is negative; if the aggregation is
        unknown, or None with denominators.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
      2025. https://arxiv.org/abs/2505.22617

    Examples:
      >>> logprobs, advantages = jnp.array([-1.0, -4.0, -1.0]), jnp.array([2.0, 0.0, -2.0])
      >>> losses, _ = kl_cov_loss(logprobs, logprobs, advantages, jnp.ones(3), aggregation=None)
      >>> losses.tolist()
      [-2.0, -0.0, 2.0]
      >>> loss, metrics = kl_cov_loss(logprobs, logprobs - 0.5, advantages, jnp.ones(3))
      >>> round(float(loss), 4), float(metrics["cov_frac"].sum)
      (0.1667, 1.0)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    rule = "is a penalty's and cannot be negative."
    coefficient = settings.number("coefficient", coefficient, rule, at_least=0)
    fraction = checked_fraction(fraction)
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    if chosen is None:
        k = num_selected(tokens.mask, fraction)
        covariance = covariances(tokens.logprobs, tokens.advantages, tokens.mask)
        selected = top_k_mask(k, tokens.mask, -covariance)
    else:
        selected = selection(chosen, tokens)
    surrogate = -tokens.advantages * jnp.exp(log_ratio)
    # Sign is 0 at 0, so the gradient is too; the derivative of jnp.abs is 1 there.
    penalty = coefficient * log_ratio * jax.lax.stop_gradient(jnp.sign(log_ratio))
    surrogate = jnp.where(selected, surrogate + penalty, surrogate)
    statistics = {**statistics, "cov_frac": selected.astype(surrogate.dtype)}
    return reduce_surrogate(
        kl_cov_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
