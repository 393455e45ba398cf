"""Clip-Cov: no gradient for a few of the tokens through which entropy collapses."""

from typing import Unpack

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.policy.covariance.covariances import (
    as_chosen,
    checked_fraction,
    covariances,
    number_chosen,
)
from jrl.losses.policy.order import random_bits, top_k_mask
from jrl.losses.policy.token_ratio.ppo import clipped
from jrl.losses.policy.tokens import Bound, Loss, prepare, reduce_surrogate
from jrl.losses.reduction import Aggregation, Denominators, Mean


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
    """Policy loss of Clip-Cov: that of PPO, and 0 on a few tokens of high covariance.

    Among the tokens that the ratio's bounds do not clip and whose covariance lies strictly between
    `low` and `high`, ``max(1, floor(fraction N))`` are chosen at random, N the true tokens of the
    batch (all of them, if there are no more). Their loss, and so their gradient, is 0.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      key: of `jax.random`. The choice depends on it and on the true tokens in their order, not on
        padding. Needed unless `fraction` is 0 or 1 or `chosen` is given.
      fraction: how much of the batch is chosen, from 0, which is none, to 1, which is all in the
        range. 2e-4 in the paper.
      low: the covariance above which a token may be chosen; 1 in the recipe.
      high: that below which it may be; 5 in the recipe.
      clip_low: as in `ppo_loss`; the recipe has bounds of 1, which hardly ever bind.
      clip_high: likewise.
      chosen: true on the tokens whose loss shall be 0, chosen beforehand. None chooses among the
        tokens given here by their own `covariances`, which is right for a **whole batch**: of each
        micro-batch at least one token would be chosen, as verl does.
      max_log_ratio: as in `ppo_loss`; None is off.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, and one metric more, ``cov_frac``, the share of tokens
      that were chosen (verl reports it as ``pg_clipfrac``).

    Raises:
      ValueError: if `key` is missing where it is needed, `fraction` is not in [0, 1], the range is
        empty, a bound is negative, the aggregation is unknown or stands beside denominators as
        None, or shapes do not agree.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
      2025. https://arxiv.org/abs/2505.22617

    Examples:
      >>> import jax, jax.numpy as jnp
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
        number = number_chosen(tokens.mask, fraction)
        covariance = covariances(tokens.logprobs, tokens.advantages, tokens.mask)
        unclipped = statistics["pg_clipfrac"] == 0
        candidates = tokens.mask & unclipped & (covariance > low) & (covariance < high)
        order = () if key is None else (random_bits(key, tokens.mask),)
        picked = top_k_mask(number, candidates, *order)
    else:
        picked = as_chosen(chosen, tokens)
    surrogate = jnp.where(picked, jnp.zeros_like(surrogate), surrogate)
    statistics = {**statistics, "cov_frac": picked.astype(surrogate.dtype)}
    return reduce_surrogate(
        clip_cov_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
