"""REINFORCE, and the losses that are REINFORCE with a weight: CISPO and VESPO.

A clip takes a token's gradient away; a weight under a stopped gradient only makes it smaller.
"""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, check_shapes
from jrl.losses.policy.tokens import (
    Bound,
    RatioLevel,
    Tokens,
    clamped_log_ratio,
    clean,
    distance,
    floored_logprobs,
    log_ratio_at,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean


def reinforce_surrogate(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> Float[Array, "*batch time"]:
    """Per-token loss of REINFORCE, ``-A logprobs``: the policy gradient without a ratio.

    It is unbiased for data sampled from the current policy, hence for one step per batch. Every
    loss of this package that has a ratio has this gradient where the ratio is 1: LUSPO times the
    length, GMPO and the sequence form of GSPO with the mean of a row's advantages.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A log-probability of minus
        infinity gives an infinite loss: there is no old policy to measure it against.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.

    Returns:
      One loss per token, 0 where the mask is false. Reduce it with `aggregate`.

    Raises:
      ValueError: if shapes do not agree.

    References:
      Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
      learning", 1992. https://doi.org/10.1007/BF00992696

    >>> import jax.numpy as jnp
    >>> reinforce_surrogate(jnp.array([-1.0, -2.0]), jnp.array([0.5, -1.0]), jnp.ones(2)).tolist()
    [0.5, -2.0]
    """
    tokens = _without_old(logprobs, advantages, mask)
    return -tokens.advantages * tokens.logprobs


def reinforce_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Loss of REINFORCE: ``-A logprobs``, weighted if asked, then `aggregate`.

    With ``aggregation="seq-mean-token-sum"`` its gradient estimates that of the expected return.
    The default, a mean over tokens, is that of GPG, whose loss this is: GPG is its group-relative
    advantages followed by this function, and `gpg_loss` is another name for it.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`, such as
        corrections for a sampler that differs from the current policy; no gradient. None is off.
      aggregation: how to weigh tokens and sequences, see `aggregate`.
      denominators: those of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`.

    Returns:
      `(loss, metrics)`. The metric ``nll`` is the mean of ``-logprobs`` over the true tokens, kept
      as a `Mean`; for tokens of the current policy it estimates the entropy.

    Raises:
      ValueError: if the aggregation is not valid, or shapes do not agree.

    References:
      As for `reinforce_surrogate`.
      Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning",
      2025. https://arxiv.org/abs/2504.02546

    >>> import jax.numpy as jnp
    >>> loss, _ = reinforce_loss(jnp.array([-1.0, -2.0]), jnp.array([0.5, -1.0]), jnp.ones(2))
    >>> float(loss)
    -0.75
    """
    tokens = _without_old(logprobs, advantages, mask)
    return reduce_surrogate(
        reinforce_loss,
        -tokens.advantages * tokens.logprobs,
        {"nll": -tokens.logprobs},
        tokens.mask,
        aggregation,
        importance_weights,
        **denominators,
    )


# The loss of GPG is that of REINFORCE; what is new in the paper is its advantages.
gpg_loss = reinforce_loss


def cispo_surrogate(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Bound | None = None,
    clip_high: Bound | None = 0.2,
    level: RatioLevel = "token",
    max_log_ratio: Number | None = 20.0,
) -> Float[Array, "*batch time"]:
    """Per-token loss of CISPO: REINFORCE with a clipped importance weight.

    With ``r = exp(logprobs - old_logprobs)``, of the token or of its row, and sg the stop of the
    gradient,

        l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs

    Where PPO drops a token beyond a bound, CISPO keeps its gradient at the weight of the bound.
    Without bounds the gradient is that of importance-weighted REINFORCE.

    `clip_high` is a distance from one, as in verl and NeMo-RL. **TRL's ``epsilon_high`` is the
    absolute value**: its 5.0 is ``clip_high=4.0`` here. No lower bound is the paper's setting,
    which verl writes as a distance of 10.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: the weight is no less than ``1 - clip_low``; None is no lower bound.
      clip_high: the weight is no more than ``1 + clip_high``; None is no upper bound.
      level: over what the ratio is taken: "token", or "sequence" for the geometric mean of a row's
        ratios, as in `gspo_surrogate`; a row must then be one whole response. (TRL:
        ``importance_sampling_level``.)
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, and the log-probability is no more than this below the old one, where the
        gradient is then 0; None is off. verl clamps at 20, TRL does not.

    Returns:
      One loss per token, 0 where the mask is false. Reduce it with `aggregate`.

    Raises:
      ValueError: if a bound is negative or `level` is unknown.

    References:
      MiniMax, "MiniMax-M1", 2025, eqs. 4 and 5. https://arxiv.org/abs/2506.13585

    >>> import jax.numpy as jnp
    >>> log_ratio, ones = jnp.array([0.1, 0.5]), jnp.ones(2)
    >>> logprobs = jnp.array([-1.0, -0.2])
    >>> losses = cispo_surrogate(logprobs, logprobs - log_ratio, ones, ones)
    >>> [round(float(loss), 4) for loss in losses]
    [1.1052, 0.24]
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    surrogate, _ = _clipped_weight(tokens, clip_low, clip_high, level, max_log_ratio)
    return surrogate


def cispo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Bound | None = None,
    clip_high: Bound | None = 0.2,
    level: RatioLevel = "token",
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Loss of CISPO: `cispo_surrogate`, weighted if asked, then `aggregate`.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: None is no lower bound; see `cispo_surrogate`, as are the settings up to
        `max_log_ratio`.
      clip_high: a distance from one; None is no upper bound.
      level: "token" or "sequence".
      max_log_ratio: None is off.
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`; no
        gradient. None is off.
      aggregation: how to weigh tokens and sequences, see `aggregate`.
      denominators: those of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`.

    Returns:
      `(loss, metrics)`. The metrics are means over the true tokens, kept as `Mean`:

      * ``pg_clipfrac``: where the weight was clipped, whatever the advantage; TRL counts positive
        advantages only;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`, or, at the
        level of sequences, as in `gspo_loss`; before the clip.

    Raises:
      ValueError: if a bound, `level` or the aggregation is not valid, or shapes do not agree.

    References:
      As for `cispo_surrogate`.

    >>> import jax.numpy as jnp
    >>> logprobs, old, ones = jnp.array([-1.0, -0.5]), jnp.array([-1.0, -1.5]), jnp.ones(2)
    >>> loss, metrics = cispo_loss(logprobs, old, ones, ones, clip_high=1.0)
    >>> float(loss), float(metrics["pg_clipfrac"].value())
    (1.0, 0.5)
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    surrogate, statistics = _clipped_weight(tokens, clip_low, clip_high, level, max_log_ratio)
    return reduce_surrogate(
        cispo_loss,
        surrogate,
        statistics,
        tokens.mask,
        aggregation,
        importance_weights,
        **denominators,
    )


def vespo_surrogate(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    k_positive: Number = 2.0,
    lam_positive: Number = 3.0,
    k_negative: Number = 3.0,
    lam_negative: Number = 2.0,
    max_log_ratio: Number | None = 20.0,
) -> Float[Array, "*batch time"]:
    """Per-token loss of VESPO: REINFORCE with a smooth weight of the response's whole ratio.

    With ``W_i = exp(sum_t (logprobs_it - old_logprobs_it))``, a product over the true tokens of row
    i and not their mean, and sg the stop of the gradient,

        log phi(W) = lam + k log W - lam W
        l_it = -sg[phi(W_i)] A_it logprobs_it

    ``phi(1) = 1``; phi rises to its maximum at ``W = k / lam`` and vanishes at 0 and infinity, so
    that responses which have become very likely or very unlikely fade out without a bound. The
    settings are ``(k_positive, lam_positive)`` where A >= 0 and ``(k_negative, lam_negative)``
    where A < 0.

    TRL keeps W between 1e-8 and ``exp(20)``, where phi is below 1e-14 anyway, and multiplies it by
    the importance weights of a mismatched sampler, which here multiply the loss.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A row is one whole
        response: a batch may be cut by rows but not along time, and rows must not be packed.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      k_positive: power of W where the advantage is positive or 0; positive, as are the three below.
      lam_positive: rate of the decay in W there.
      k_negative: power of W where the advantage is negative.
      lam_negative: rate of the decay in W there.
      max_log_ratio: each token's log-ratio is clamped to plus or minus this many nats before the
        sum, and the log-probability is no more than this below the old one, where the gradient is
        then 0; None is off. TRL clamps the ratio at 20 as well.

    Returns:
      One loss per token, 0 where the mask is false. Reduce it with `aggregate`.

    Raises:
      ValueError: if a power or a rate is not positive.

    References:
      "VESPO: variational sequence-level soft policy optimization for stable off-policy LLM
      training", 2026. https://arxiv.org/abs/2602.10693

    >>> import jax.numpy as jnp
    >>> log_ratio, ones = jnp.array([[0.1, -0.3, 0.0], [9.0, 9.0, 9.0]]), jnp.ones((2, 3))
    >>> losses = vespo_surrogate(-ones, -ones - log_ratio, ones, ones)
    >>> [round(float(loss), 4) for loss in losses[:, 0]]
    [1.1547, 0.0]
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    powers = (k_positive, lam_positive, k_negative, lam_negative)
    surrogate, _ = _soft_weight(tokens, *powers, max_log_ratio)
    return surrogate


def vespo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    k_positive: Number = 2.0,
    lam_positive: Number = 3.0,
    k_negative: Number = 3.0,
    lam_negative: Number = 2.0,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Loss of VESPO: `vespo_surrogate`, weighted if asked, then `aggregate`.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A row is one whole
        response.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      k_positive: see `vespo_surrogate`, as are the other powers and rates and `max_log_ratio`.
      lam_positive: 3 in TRL.
      k_negative: 3 in TRL.
      lam_negative: 2 in TRL.
      max_log_ratio: None is off.
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`; no
        gradient. None is off.
      aggregation: how to weigh tokens and sequences, see `aggregate`; token-mean as in TRL.
      denominators: those of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`.

    Returns:
      `(loss, metrics)`. The metrics are means over the true tokens, kept as `Mean`:

      * ``phi``: the weight of the row, counted once for each of its tokens;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: of the tokens, as in
        `ppo_loss`.

    Raises:
      ValueError: if a power, a rate or the aggregation is not valid, or shapes do not agree.

    References:
      As for `vespo_surrogate`.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((1, 3))
    >>> loss, metrics = vespo_loss(-ones, -ones, ones, ones)
    >>> float(loss), float(metrics["phi"].value())
    (1.0, 1.0)
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    powers = (k_positive, lam_positive, k_negative, lam_negative)
    surrogate, statistics = _soft_weight(tokens, *powers, max_log_ratio)
    return reduce_surrogate(
        vespo_loss,
        surrogate,
        statistics,
        tokens.mask,
        aggregation,
        importance_weights,
        **denominators,
    )


def _without_old(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> Tokens:
    """Clean arrays of a loss that has no old policy."""
    check_shapes(logprobs=logprobs, mask=mask)
    return clean(logprobs, logprobs, advantages, mask)


def _clipped_weight(
    tokens: Tokens,
    clip_low: Bound | None,
    clip_high: Bound | None,
    level: RatioLevel,
    max_log_ratio: Number | None,
) -> tuple[Float[Array, "*batch time"], dict[str, Float[Array, "*batch time"]]]:
    """The surrogate of `cispo_surrogate`, and the statistics of `cispo_loss` for each token."""
    log_ratio, statistics = log_ratio_at(level, tokens, max_log_ratio)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = ratio
    if clip_low is not None:
        weight = jnp.maximum(weight, 1 - distance("clip_low", clip_low, tokens))
    if clip_high is not None:
        weight = jnp.minimum(weight, 1 + distance("clip_high", clip_high, tokens))
    surrogate = -weight * tokens.advantages * floored_logprobs(tokens, max_log_ratio)
    return surrogate, {"pg_clipfrac": (weight != ratio).astype(ratio.dtype), **statistics}


def _soft_weight(
    tokens: Tokens,
    k_positive: Number,
    lam_positive: Number,
    k_negative: Number,
    lam_negative: Number,
    max_log_ratio: Number | None,
) -> tuple[Float[Array, "*batch time"], dict[str, Float[Array, "*batch time"]]]:
    """The surrogate of `vespo_surrogate`, and the statistics of `vespo_loss` for each token."""
    given = {
        "k_positive": k_positive,
        "lam_positive": lam_positive,
        "k_negative": k_negative,
        "lam_negative": lam_negative,
    }
    rule = "must be positive, so that the weight vanishes far from one."
    k_positive, lam_positive, k_negative, lam_negative = (
        settings.number(name, x, rule, above=0) for name, x in given.items()
    )
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    dtype, positive = log_ratio.dtype, tokens.advantages >= 0
    k = jnp.where(positive, k_positive, k_negative).astype(dtype)
    lam = jnp.where(positive, lam_positive, lam_negative).astype(dtype)
    log_w = jax.lax.stop_gradient(jnp.sum(log_ratio, axis=-1, keepdims=True))
    # Beyond what an exponential can hold the weight is 0; expm1 keeps phi exact near W = 1.
    phi = jnp.exp(k * log_w - lam * jnp.expm1(log_w))
    phi = jnp.where(log_w == jnp.inf, jnp.zeros_like(phi), phi)
    surrogate = -phi * tokens.advantages * floored_logprobs(tokens, max_log_ratio)
    return surrogate, {"phi": phi, **statistics}
