"""Policy losses with one importance ratio per response (row): GSPO, LUSPO and GMPO."""

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
    """Policy loss of GSPO: PPO's clip on the sequence-level ratio, the geometric mean over tokens.

    With ``n_i`` the number of tokens of row i in the mask and sg the stop-gradient,

        s_i  = exp(sum_t (logprobs_it - old_logprobs_it) / n_i)
        s_it = sg[s_i] pi_it / sg[pi_it]                        gradient="token"
        s_it = s_i                                              gradient="sequence"
        l_it = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))
        l_it = min(l_it, -A_it clip_dual)                    where A_it < 0, if clip_dual is set

    The two forms have equal values. Their gradients are equal too when a row has one advantage:
    ``-A s_i / n_i`` for each token in the row's mean. When advantages differ within a row, "token"
    weights each token by its own advantage (GSPO-token), "sequence" weights all of them by the
    mean.

    verl has the token form, TRL and OpenRLHF the sequence form. The bounds are about five hundred
    times narrower than PPO's, because the mean log-ratio of a row varies far less than a
    token's.

    A row must be one whole response: split a batch by rows, not along time, and do not pack rows.
    Some versions of verl always use `seq-mean-token-mean`, the default here, whatever is
    configured.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: lower bound ``1 - clip_low`` of the ratio, for tokens with a negative advantage.
      clip_high: upper bound ``1 + clip_high`` of it, for tokens with a positive advantage.
      clip_dual: the ratio of the row, above 1, beyond which tokens with a negative advantage have
        no gradient (dual clip); None disables it. OpenRLHF's ``dual_clip``, and at this level TRL's
        ``delta``.
      gradient: "token" or "sequence", as above.
      max_log_ratio: each token's log-ratio is clamped to plus or minus this many nats before the
        mean; the gradient of a clamped token is 0. None disables the clamp. verl caps the mean
        instead, at +10; TRL and OpenRLHF have no clamp.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``pg_clipfrac``: clipped fraction; tokens of a row with the same sign of advantage are
        clipped together;
      * ``pg_clipfrac_lower``: the same for the dual clip, if it is set;
      * ``ppo_kl``: minus the row's mean log-ratio, the k1 estimate of KL(old || current);
      * ``ratio``, ``ratio_squared``: of the row, once per token;
      * ``ratio_clamped``: fraction of tokens with a log-ratio beyond `max_log_ratio`.

    Raises:
      ValueError: if a bound is negative, `clip_dual` is not above 1 or `gradient` is unknown; if
        the aggregation is unknown, or None with denominators.

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
    """Surrogate of `gspo_loss` and its statistics, per token."""
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
    """Policy loss of LUSPO: `gspo_loss` per token, times the length of the response.

    ``l_it = n_i max(-A s_it, -A clip(s_it, 1 - clip_low, 1 + clip_high))`` with ``n_i`` the number
    of tokens of row i in the mask. GSPO's mean within a response divides its gradient by the
    length, which gives the tokens of long responses less weight; the factor cancels this.

    With the default aggregation it equals `gspo_loss` with ``aggregation="seq-mean-token-sum"`` and
    the bounds of this function. TRL divides by all rows (``empty_rows="count"``). As in
    `gspo_loss`, a row must be one whole response.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: as in `gspo_loss`, like the settings up to `max_log_ratio`; the defaults are those
        that TRL recommends.
      clip_high: upper bound; TRL recommends 2.5e-3.
      clip_dual: None disables it.
      gradient: "token" or "sequence".
      max_log_ratio: None disables the clamp.
      importance_weights: as in `ppo_loss`; None disables them.
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
    """Policy loss of GMPO: the geometric mean of a row's ratios, each clipped before the mean.

    With ``d = logprobs - old_logprobs`` and ``n_i`` the number of tokens of row i in the mask,

        c_it = min(d_it, clip_high)      where A_it > 0
        c_it = max(d_it, -clip_low)      where A_it < 0
        c_it = 0                         where A_it = 0
        l_it = -(sum_t A_it / n_i) exp(sum_t c_it / n_i)

    The bounds are in **log space**, in nats: 0.4 bounds a ratio at 0.67 and 1.49. A token beyond
    its bound has no gradient; the others of its row keep theirs. All tokens of a row in the mask
    have the row's loss.

    Advantages are meant to be one per row. With one per token, each token is clipped by the sign of
    its own and the row is weighted by their mean, as in verl's ``geo_mean``; the first on-policy
    step is then REINFORCE with that mean.

    A row must be one whole response: split a batch by rows, not along time, and do not pack rows.
    The default is the mean over responses. verl averages over all rows, empty ones included
    (``empty_rows="count"``), and ignores the aggregation and any denominator of the whole batch.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: lower bound ``-clip_low`` of the log-ratio, in nats, for tokens with a negative
        advantage.
      clip_high: upper bound of the log-ratio, in nats, for tokens with a positive advantage.
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats first, where the
        gradient is 0; it matters on the side that is not clipped. None disables the clamp, as in
        verl.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``pg_clipfrac``: fraction of tokens whose log-ratio a bound clips;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`; before the
        clip.

    Raises:
      ValueError: if a bound is negative; if the aggregation is unknown, or None with denominators.

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
