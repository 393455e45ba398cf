"""GSPO: the clip of PPO on one ratio for the whole response."""

from typing import Unpack, get_args

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Number
from jrl.losses.policy.token_ratio.ppo import clipped
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    SequenceGradient,
    Tokens,
    average_over_rows,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean


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

    A row must be one whole response: a batch may be cut by rows, but not along time, and rows must
    not hold several responses.

    Some versions of verl take `seq-mean-token-mean` whatever is configured; here the aggregation
    is an argument, with that default.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A row is one whole
        response.
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
        aggregation is unknown, denominators stand beside ``aggregation=None``, or shapes do not
        agree.

    References:
      Zheng et al., "Group sequence policy optimization", 2025, section 4.1 (sequence) and 4.3
      (token); bounds from section 5.1. https://arxiv.org/abs/2507.18071

    Examples:
      >>> import jax.numpy as jnp
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
) -> tuple[Float[Array, "*batch time"], dict[str, Float[Array, "*batch time"]]]:
    """The surrogate of `gspo_loss`, and its statistics for each token."""
    if gradient not in get_args(SequenceGradient):
        raise ValueError(f"gradient={gradient!r} is neither 'token' nor 'sequence'.")
    rows, ratio_clamped = average_over_rows(tokens, max_log_ratio, gradient)
    surrogate, statistics = clipped(rows, clip_low, clip_high, clip_dual, None)
    if clip_dual is None:
        del statistics["pg_clipfrac_lower"]
    return surrogate, {**statistics, "ratio_clamped": ratio_clamped}
