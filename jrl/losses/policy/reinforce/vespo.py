"""VESPO: a response fades out smoothly as its whole ratio leaves one."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.policy.tokens import (
    Loss,
    clamped_log_ratio,
    floored_logprobs,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean


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
    """Loss of VESPO: REINFORCE with a smooth weight of the response's whole ratio.

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
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token. The default is TRL's.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``phi``: the weight of the row, counted once for each of its tokens;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: of the tokens, as in
        `ppo_loss`.

    Raises:
      ValueError: if a power or a rate is not positive, the aggregation is unknown or stands beside
        denominators as None, or shapes do not agree.

    References:
      "VESPO: variational sequence-level soft policy optimization for stable off-policy LLM
      training", 2026. https://arxiv.org/abs/2602.10693

    Examples:
      >>> import jax.numpy as jnp
      >>> log_ratio, ones = jnp.array([[0.1, -0.3, 0.0], [9.0, 9.0, 9.0]]), jnp.ones((2, 3))
      >>> losses, _ = vespo_loss(-ones, -ones - log_ratio, ones, ones, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses[:, 0]]
      [1.1547, 0.0]
      >>> ones = jnp.ones((1, 3))
      >>> loss, metrics = vespo_loss(-ones, -ones, ones, ones)
      >>> float(loss), float(metrics["phi"].value())
      (1.0, 1.0)
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
    # Beyond what an exponential can hold the weight is 0; expm1 keeps phi exact near W = 1.
    phi = jnp.exp(k * log_w - lam * jnp.expm1(log_w))
    phi = jnp.where(log_w == jnp.inf, jnp.zeros_like(phi), phi)
    surrogate = -phi * tokens.advantages * floored_logprobs(tokens, max_log_ratio)
    statistics = {"phi": phi, **statistics}
    return reduce_surrogate(
        vespo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
