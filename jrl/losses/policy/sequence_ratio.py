"""Policy losses with one ratio for a whole response, which is a row: GSPO, LUSPO and GMPO."""

from typing import Unpack

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, PerToken, row_lengths, row_mean, zero_masked
from jrl.losses.policy.token_ratio import clipped
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    SequenceGradient,
    Statistics,
    Tokens,
    average_over_rows,
    clamped_log_ratio,
    distance,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean

__all__ = ["gspo_loss", "luspo_loss", "gmpo_loss"]  # noqa: RUF022


def gspo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Bound = 3e-4,
    clip_high: Bound = 4e-4,
    clip_dual: Number | None = None,
    gradient: SequenceGradient = "token",
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "seq-mean-token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Loss of GSPO: PPO's clip on the geometric mean of a response's ratios.

    With ``n_i`` the true tokens of row i and sg the stop of the gradient,

        s_i  = exp(sum_t (logprobs_it - old_logprobs_it) / n_i)
        s_it = sg[s_i] pi_it / sg[pi_it]                        gradient="token"
        s_it = s_i                                              gradient="sequence"
        l_it = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))
        l_it = min(l_it, -A_it clip_dual)                    where A_it < 0, if clip_dual is set

    The two forms have equal values. Their gradients are equal too when a row has one advantage:
    each token then gets ``-A s_i / n_i`` of the row's mean. When advantages differ within a row,
    "token" gives each token its own advantage (GSPO-token), "sequence" gives all of them the mean.

    verl has the token form, TRL and OpenRLHF the sequence form. The bounds are some five hundred
    times narrower than PPO's because a mean over tokens moves far less than a token.

    A row must be one whole response: cut a batch by rows and not along time, and pack none. Some
    versions of verl take `seq-mean-token-mean`, the default here, whatever is configured.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: how far the ratio may fall below one before a negative advantage stops acting.
      clip_high: how far it may rise above one before a positive advantage stops acting.
      clip_dual: the ratio of the row, greater than one, beyond which a negative advantage stops
        acting as well; None is off. It is OpenRLHF's ``dual_clip``, and at this level TRL's
        ``delta``.
      gradient: "token" or "sequence", as above.
      max_log_ratio: each token's log-ratio is clamped to plus or minus this many nats before the
        mean, where the token's gradient is then 0; None is off. verl caps the mean instead, at +10;
        TRL and OpenRLHF have no clamp.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``pg_clipfrac``: where the clip binds, which it does for all of a row's tokens whose
        advantages have one sign;
      * ``pg_clipfrac_lower``: where the dual clip does, if it is on;
      * ``ppo_kl``: minus the row's mean log-ratio, the k1 estimate of KL(old || current);
      * ``ratio``, ``ratio_squared``: of the row, counted once for each of its tokens;
      * ``ratio_clamped``: where `max_log_ratio` was exceeded.

    Raises:
      ValueError: if a bound is negative, `clip_dual` is not above one, `gradient` or the
        aggregation is unknown, or denominators stand beside ``aggregation=None``.

    References:
      Zheng et al., "Group sequence policy optimization", 2025, section 4.1 (sequence) and 4.3
      (token); bounds from section 5.1. https://arxiv.org/abs/2507.18071

    Examples:
      >>> log_ratio = jnp.array([[0.1, -0.3, 0.0], [0.5, 0.1, 0.0]])
      >>> mask = jnp.array([[1, 1, 1], [1, 1, 0]])
      >>> advantages = jnp.array([[1.0], [-0.5]])
      >>> losses, _ = gspo_loss(log_ratio, 0 * log_ratio, advantages, mask, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses[:, 0]]
      [-0.9355, 0.6749]
      >>> loss, metrics = gspo_loss(log_ratio, 0 * log_ratio, advantages, mask)
      >>> round(float(loss), 4), float(metrics["pg_clipfrac"].value())
      (-0.1303, 0.0)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    surrogate, statistics = sequence_clipped(
        tokens, clip_low, clip_high, clip_dual, gradient, max_log_ratio
    )
    return reduce_surrogate(
        gspo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def sequence_clipped(
    tokens: Tokens,
    clip_low: Bound,
    clip_high: Bound,
    clip_dual: Number | None,
    gradient: SequenceGradient,
    max_log_ratio: Number | None,
) -> tuple[PerToken, Statistics]:
    """The surrogate of `gspo_loss`, and its statistics for each token."""
    settings.choice("gradient", gradient, SequenceGradient)
    rows, ratio_clamped = average_over_rows(tokens, max_log_ratio, gradient)
    surrogate, statistics = clipped(rows, clip_low, clip_high, clip_dual, None)
    if clip_dual is None:
        del statistics["pg_clipfrac_lower"]
    return surrogate, {**statistics, "ratio_clamped": ratio_clamped}


def luspo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Bound = 2e-3,
    clip_high: Bound = 2.5e-3,
    clip_dual: Number | None = None,
    gradient: SequenceGradient = "token",
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "seq-mean-token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Loss of LUSPO: that of `gspo_loss` for each token, times the length of the response.

    ``l_it = n_i max(-A s_it, -A clip(s_it, 1 - clip_low, 1 + clip_high))`` with ``n_i`` the true
    tokens of row i. GSPO's mean within a response divides its gradient by the length, which makes
    long responses count less per token; the factor takes that back.

    With the default aggregation it equals `gspo_loss` with ``aggregation="seq-mean-token-sum"`` and
    the bounds of this function. TRL divides by all rows (``empty_rows="count"``). As there, a row
    must be one whole response.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: see `gspo_loss`, as are the settings up to `max_log_ratio`; the defaults are
        those that TRL recommends.
      clip_high: 2.5e-3 there.
      clip_dual: None is off.
      gradient: "token" or "sequence".
      max_log_ratio: None is off.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `gspo_loss`.

    Raises:
      ValueError: as `gspo_loss`.

    References:
      Liu et al., "Length-unbiased sequence policy optimization", 2026.
      https://arxiv.org/abs/2602.05261

    Examples:
      >>> zeros, mask = jnp.zeros((2, 3)), jnp.array([[1, 1, 1], [1, 1, 0]])
      >>> arrays = zeros, zeros, jnp.array([[1.0], [-0.5]]), mask
      >>> losses, _ = luspo_loss(*arrays, aggregation=None)
      >>> losses[:, 0].tolist(), float(luspo_loss(*arrays)[0])
      ([-3.0, 1.0], -1.0)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    surrogate, statistics = sequence_clipped(
        tokens, clip_low, clip_high, clip_dual, gradient, max_log_ratio
    )
    surrogate = surrogate * row_lengths(tokens.mask, surrogate)
    return reduce_surrogate(
        luspo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


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

    A row must be one whole response: cut a batch by rows and not along time, and pack none. The
    default is the mean over responses. verl takes it over all rows, empty ones included
    (``empty_rows="count"``), and ignores the aggregation and any denominator of the whole batch.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
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
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`; before the
        clip.

    Raises:
      ValueError: if a bound is negative, or the aggregation is unknown or stands beside
        denominators as None.

    References:
      Zhao et al., "Geometric-mean policy optimization", 2025, section 3.
      https://arxiv.org/abs/2507.20673

    Examples:
      >>> log_ratio = jnp.array([[0.1, -0.3, 0.0], [0.5, 0.1, 0.0]])
      >>> mask = jnp.array([[1, 1, 1], [1, 1, 0]])
      >>> advantages = jnp.array([[1.0], [-0.5]])
      >>> losses, _ = gmpo_loss(log_ratio, 0 * log_ratio, advantages, mask, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses[:, 0]]
      [-0.9355, 0.6749]
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    low, high = distance("clip_low", clip_low, tokens), distance("clip_high", clip_high, tokens)
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    rising, falling = tokens.advantages > 0, tokens.advantages < 0
    above, below = rising & (log_ratio > high), falling & (log_ratio < -low)
    bounded = jnp.where(above, high, jnp.where(below, -low, log_ratio))
    bounded = zero_masked(bounded, rising | falling)
    loss = -row_mean(tokens.advantages, tokens.mask) * jnp.exp(row_mean(bounded, tokens.mask))
    surrogate = jnp.where(tokens.mask, loss, 0)
    statistics = {"pg_clipfrac": (above | below).astype(log_ratio.dtype), **statistics}
    return reduce_surrogate(
        gmpo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
