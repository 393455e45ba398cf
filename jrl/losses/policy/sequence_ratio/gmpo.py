"""GMPO: the geometric mean of a response's clipped ratios."""

from typing import Unpack

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Number, zero_masked
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    clamped_log_ratio,
    distance,
    prepare,
    reduce_surrogate,
    row_mean,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean


def gmpo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Bound = 0.4,
    clip_high: Bound = 0.4,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "seq-mean-token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Loss of GMPO: tokens are clipped one by one, then their geometric mean is taken.

    With ``d = logprobs - old_logprobs`` and ``n_i`` the true tokens of row i,

        c_it = min(d_it, clip_high)      where A_it > 0
        c_it = max(d_it, -clip_low)      where A_it < 0
        c_it = 0                         where A_it = 0
        l_it = -(sum_t A_it / n_i) exp(sum_t c_it / n_i)

    The bounds are in **log space**, in nats: 0.4 lets a ratio move between 0.67 and 1.49. A token
    beyond its bound has no gradient; the others of its row keep theirs. All true tokens of a row
    have the row's loss.

    Advantages are meant to be one per row. Given one per token, each token is clipped by the sign
    of its own and the row is weighted by their mean, as in verl's ``geo_mean``; the first on-policy
    step is then REINFORCE with that mean.

    A row must be one whole response: a batch may be cut by rows, but not along time, and rows must
    not hold several responses.

    The default is the mean over responses. verl takes it over all rows, empty ones included
    (``empty_rows="count"``), and ignores the aggregation and any denominator of the whole batch.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A row is one whole
        response.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: how many nats a token may fall below the old policy before a negative advantage
        stops acting on it.
      clip_high: how many it may rise above before a positive advantage stops acting on it.
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats first, where the
        gradient is then 0; it matters on the side that is not clipped. None is off, as in verl.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``pg_clipfrac``: where a token's log-ratio was clipped by a bound;
      * ``ppo_kl``: ``old_logprobs - logprobs``, the k1 estimate of KL(old || current);
      * ``ratio``, ``ratio_squared``: of the tokens, before the clip;
      * ``ratio_clamped``: where `max_log_ratio` was exceeded.

    Raises:
      ValueError: if a bound is negative, the aggregation is unknown or stands beside denominators
        as None, or shapes do not agree.

    References:
      Zhao et al., "Geometric-mean policy optimization", 2025, section 3.
      https://arxiv.org/abs/2507.20673

    Examples:
      >>> import jax.numpy as jnp
      >>> log_ratio = jnp.array([[0.1, -0.3, 0.0], [0.5, 0.1, 0.0]])
      >>> mask = jnp.array([[1, 1, 1], [1, 1, 0]])
      >>> advantages = jnp.array([[1.0], [-0.5]])
      >>> losses, _ = gmpo_loss(log_ratio, 0 * log_ratio, advantages, mask, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses[:, 0]]
      [-0.9355, 0.6749]
      >>> log_ratio = jnp.array([[0.1, -0.3, 0.5]])
      >>> ones = jnp.ones_like(log_ratio)
      >>> loss, metrics = gmpo_loss(log_ratio, 0 * log_ratio, ones, ones)
      >>> round(float(loss), 4), round(float(metrics["pg_clipfrac"].value()), 4)
      (-1.0689, 0.3333)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    low, high = distance("clip_low", clip_low, tokens), distance("clip_high", clip_high, tokens)
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    rising, falling = tokens.advantages > 0, tokens.advantages < 0
    above, below = rising & (log_ratio > high), falling & (log_ratio < -low)
    bounded = jnp.where(above, high, jnp.where(below, -low, log_ratio))
    bounded = zero_masked(bounded, rising | falling)
    loss = -row_mean(tokens.advantages, tokens) * jnp.exp(row_mean(bounded, tokens))
    surrogate = jnp.where(tokens.mask, loss, jnp.zeros_like(log_ratio))
    clipped_tokens = (above | below).astype(log_ratio.dtype)
    statistics = {"pg_clipfrac": clipped_tokens, **statistics}
    return reduce_surrogate(
        gmpo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
