"""REINFORCE and variants: with importance weights (CISPO, VESPO), with a penalty (DRO), and the
positive-example loss of VAPO."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, Scalar, as_floats, as_mask, check_rows, check_shapes
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    RatioLevel,
    clamped_log_ratio,
    distance,
    floored_logprobs,
    log_ratio_at,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean, aggregate

__all__ = [  # noqa: RUF022 - in reading order
    "reinforce_loss",
    "gpg_loss",
    "cispo_loss",
    "vespo_loss",
    "dro_loss",
    "positive_example_loss",
]


def reinforce_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy-gradient loss of REINFORCE, ``-A logprobs``, with no ratio.

    It is unbiased for data sampled from the current policy, hence for one step per batch. The
    losses of this package that have a ratio have this gradient where the ratio is 1, except LUSPO
    (times the length), GMPO and the sequence forms of GSPO, LUSPO and SAPO (with the mean of a
    row's advantages), HAPO (with its own advantages) and Clip-Cov (0 on the selected tokens).

    With ``aggregation="seq-mean-token-sum"`` it estimates the gradient of the expected
    return. The default, a mean over tokens, is GPG's: GPG is group-relative advantages followed
    by this loss, and `gpg_loss` is another name for it.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A log-probability of minus
        infinity gives an infinite loss: there is no old policy to floor it by.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with one metric, ``nll``, the mean of ``-logprobs``. For
      tokens sampled from the current policy it estimates the entropy.

    Raises:
      ValueError: if the aggregation is unknown, or None with denominators.

    References:
      Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
      learning", 1992. https://doi.org/10.1007/BF00992696
      Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning",
      2025. https://arxiv.org/abs/2504.02546

    Examples:
      >>> arrays = jnp.array([-1.0, -2.0]), jnp.array([0.5, -1.0]), jnp.ones(2)
      >>> losses, _ = reinforce_loss(*arrays, aggregation=None)
      >>> losses.tolist(), float(reinforce_loss(*arrays)[0])
      ([0.5, -2.0], -0.75)
    """
    check_shapes(logprobs=logprobs, mask=mask)
    tokens = prepare(logprobs, logprobs, advantages, mask)
    surrogate = -tokens.advantages * tokens.logprobs
    nll = {"nll": -tokens.logprobs}
    return reduce_surrogate(
        reinforce_loss, surrogate, nll, tokens, aggregation, importance_weights, denominators
    )


# GPG has the loss of REINFORCE; the paper's contribution is the advantages.
gpg_loss = reinforce_loss


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
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of CISPO: REINFORCE with a clipped importance weight.

    With ``r = exp(logprobs - old_logprobs)``, of the token or of its row, and sg the stop-gradient,

        l = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprobs

    PPO drops the gradient of a token beyond a bound; CISPO keeps it, with the bound as its weight.
    Without bounds it is the gradient of importance-weighted REINFORCE.

    `clip_high` is a distance from one, as in verl and NeMo-RL. **TRL's ``epsilon_high`` is the
    absolute value**: its 5.0 is ``clip_high=4.0`` here. The paper has no lower bound, which verl
    writes as a distance of 10.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: the lower bound of the weight is ``1 - clip_low``; None is no lower bound.
      clip_high: the upper bound of the weight is ``1 + clip_high``; None is no upper bound.
      level: level of the ratio: "token", or "sequence" for the geometric mean of a row's ratios, as
        in `gspo_loss`; a row must then be one whole response. (TRL: ``importance_sampling_level``.)
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, and the log-probability is floored this far below the old one, where the
        gradient is 0; None disables both. verl clamps at 20, TRL does not.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``pg_clipfrac``: fraction of tokens whose weight was clipped, whatever the advantage; TRL
        includes positive advantages only;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`, or at the
        sequence level as in `gspo_loss`; before the clip.

    Raises:
      ValueError: if a bound is negative or `level` is unknown; if the aggregation is unknown, or
        None with denominators.

    References:
      MiniMax, "MiniMax-M1", 2025, eqs. 4 and 5. https://arxiv.org/abs/2506.13585

    Examples:
      >>> log_ratio, ones = jnp.array([0.1, 0.5]), jnp.ones(2)
      >>> logprobs = jnp.array([-1.0, -0.2])
      >>> losses, _ = cispo_loss(logprobs, logprobs - log_ratio, ones, ones, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses]
      [1.1052, 0.24]
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    log_ratio, statistics = log_ratio_at(level, tokens, max_log_ratio)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = ratio
    if clip_low is not None:
        weight = jnp.maximum(weight, 1 - distance("clip_low", clip_low, tokens))
    if clip_high is not None:
        weight = jnp.minimum(weight, 1 + distance("clip_high", clip_high, tokens))
    surrogate = -weight * tokens.advantages * floored_logprobs(tokens, max_log_ratio)
    statistics = {"pg_clipfrac": (weight != ratio).astype(ratio.dtype), **statistics}
    return reduce_surrogate(
        cispo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


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
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of VESPO: REINFORCE with a smooth weight of the sequence-level importance ratio.

    With ``W_i = exp(sum_t (logprobs_it - old_logprobs_it))``, the product (not the mean) of the
    ratios of row i, and sg the stop-gradient,

        log phi(W) = lam + k log W - lam W
        l_it = -sg[phi(W_i)] A_it logprobs_it

    ``phi(1) = 1``. phi has its maximum at ``W = k / lam`` and tends to 0 at 0 and infinity, so
    responses that have become very likely or very unlikely are down-weighted smoothly, not
    clipped. The settings are ``(k_positive, lam_positive)`` where A >= 0 and
    ``(k_negative, lam_negative)`` where A < 0.

    TRL clamps W between 1e-8 and ``exp(20)``, beyond which phi is below 1e-14 anyway, and
    multiplies it by the importance weights of a mismatched sampler, which here multiply the loss.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats. A row is one whole
        response: a batch may be split by rows but not along time, and rows must not be packed.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      k_positive: exponent of W where the advantage is positive or 0; positive, as are the three
        below.
      lam_positive: rate of the decay in W there.
      k_negative: exponent of W where the advantage is negative.
      lam_negative: rate of the decay in W there.
      max_log_ratio: each token's log-ratio is clamped to plus or minus this many nats before the
        sum, and the log-probability is floored this far below the old one, where the gradient is 0;
        None disables both. TRL clamps the ratio at 20 as well.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token. The default is TRL's.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``phi``: the weight of the row, once per token;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`.

    Raises:
      ValueError: if an exponent or a rate is not positive; if the aggregation is unknown, or None
        with denominators.

    References:
      "VESPO: variational sequence-level soft policy optimization for stable off-policy LLM
      training", 2026. https://arxiv.org/abs/2602.10693

    Examples:
      >>> log_ratio, ones = jnp.array([[0.1, -0.3, 0.0], [9.0, 9.0, 9.0]]), jnp.ones((2, 3))
      >>> losses, _ = vespo_loss(-ones, -ones - log_ratio, ones, ones, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses[:, 0]]
      [1.1547, 0.0]
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    parameters = {
        "k_positive": k_positive,
        "lam_positive": lam_positive,
        "k_negative": k_negative,
        "lam_negative": lam_negative,
    }
    rule = "must be positive, so that the weight vanishes far from one."
    k_positive, lam_positive, k_negative, lam_negative = (
        settings.number(name, x, rule, above=0) for name, x in parameters.items()
    )
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    dtype, positive = log_ratio.dtype, tokens.advantages >= 0
    k = jnp.where(positive, k_positive, k_negative).astype(dtype)
    lam = jnp.where(positive, lam_positive, lam_negative).astype(dtype)
    log_w = jax.lax.stop_gradient(jnp.sum(log_ratio, axis=-1, keepdims=True))
    # The weight is 0 where W overflows; expm1 keeps the digits of W - 1 near W = 1.
    phi = jnp.exp(k * log_w - lam * jnp.expm1(log_w))
    phi = jnp.where(log_w == jnp.inf, 0, phi)
    surrogate = -phi * tokens.advantages * floored_logprobs(tokens, max_log_ratio)
    statistics = {"phi": phi, **statistics}
    return reduce_surrogate(
        vespo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def dro_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    beta: Number,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of DRO: a policy gradient with a quadratic penalty on the log-ratio.

    ``l = -(A logprobs - (beta / 2) (logprobs - old_logprobs)^2)``. Its gradient,
    ``-(A - beta (logprobs - old_logprobs))``, is REINFORCE's where the policies are equal and
    vanishes where the log-ratio is ``A / beta``, the optimum of a KL-regularised objective. There
    is no exponential that off-policy data could make overflow.

    The paper defines it for whole responses and trains a value function with it; this is its policy
    loss per token, as in verl, with any advantages.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the penalty is relative to; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      beta: weight of the penalty, 0 or more, in units of advantage per nat. There is no usual
        value: it has the scale of the advantages.
      max_log_ratio: the log-ratio of the penalty is clamped to plus or minus this many nats, and
        the log-probability is floored this far below the old one, where the gradients are 0; None
        disables both.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``dro_penalty``: ``(beta / 2) (logprobs - old_logprobs)^2``;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`.

    Raises:
      ValueError: if `beta` is negative; if the aggregation is unknown, or None with denominators.

    References:
      Richemond et al., "Offline regularised reinforcement learning for large language models
      alignment", 2024. https://arxiv.org/abs/2405.19107

    Examples:
      >>> ones = jnp.ones(2)
      >>> arrays = jnp.array([-1.0, -3.0]), -ones, ones, ones
      >>> losses, _ = dro_loss(*arrays, beta=0.5, aggregation=None)
      >>> losses.tolist(), float(dro_loss(*arrays, beta=0.5)[0])
      ([1.0, 4.0], 2.5)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    rule = "weighs a penalty and cannot be negative; 0 is off."
    beta = settings.number("beta", beta, rule, at_least=0)
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    penalty = 0.5 * beta * log_ratio**2
    surrogate = penalty - tokens.advantages * floored_logprobs(tokens, max_log_ratio)
    statistics = {"dro_penalty": penalty, **statistics}
    return reduce_surrogate(
        dro_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def positive_example_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    correct: Shaped[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    num_tokens: Scalar | None = None,
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Positive-example loss of VAPO: negative log-likelihood of the correct responses.

    ``-sum_{i in T} sum_t logprobs_it / sum_{i in T} n_i`` with T the correct responses and ``n_i``
    the tokens of row i in the mask: a mean over *their* tokens, not over sequences and not over the
    tokens of the batch. VAPO adds it to the policy loss with a factor of 0.1.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      correct: true for the responses to imitate, one per row.
      mask: true on sampled tokens.
      num_tokens: sampled tokens of *correct* responses in the whole batch; None counts them in
        these arrays.

    Returns:
      `(loss, metrics)`; loss and gradient are 0 if no response is correct. The metric
      ``positive_nll`` is the same mean as a `Mean`.

    Raises:
      ValueError: if `correct` does not have one entry per row.

    References:
      Yue et al., "VAPO", 2025, section 4.3. https://arxiv.org/abs/2504.05118

    Examples:
      >>> logprobs = jnp.array([[-1.0, -2.0], [-3.0, -4.0]])
      >>> loss, _ = positive_example_loss(logprobs, jnp.array([1, 0]), jnp.ones((2, 2)))
      >>> float(loss)
      1.5
    """
    check_shapes(logprobs=logprobs, mask=mask)
    check_rows("mask", mask, correct=correct)
    imitated = as_mask(mask) & as_mask(correct)[..., None]
    (logprobs,) = as_floats(logprobs)
    loss = aggregate(-logprobs, imitated, "token-mean", num_tokens=num_tokens)
    return loss, {"positive_nll": Mean.of(-logprobs, imitated)}
