"""DRO: the log-probability itself, held near the old one by a quadratic penalty."""

from typing import Unpack

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
    """Loss of DRO, a policy gradient with a quadratic penalty instead of a clip.

    ``l = -(A logprobs - (beta / 2) (logprobs - old_logprobs)^2)``. Its gradient,
    ``-(A - beta (logprobs - old_logprobs))``, is that of REINFORCE where the policies are equal and
    vanishes where the log-ratio is ``A / beta``, the optimum of a KL-regularised objective. There
    is no exponential, so off-policy data cannot blow it up.

    The paper states it for whole responses and learns a value beside it; as in verl, this is its
    policy loss per token, with advantages from wherever one likes.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy to stay near; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      beta: weight of the penalty, 0 or more, in units of advantage per nat. There is no usual
        value: it has the scale of the advantages.
      max_log_ratio: the log-ratio of the penalty is clamped to plus or minus this many nats, and
        the log-probability to no more than this below the old one, where the gradients are then 0;
        None is off.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``dro_penalty``: ``(beta / 2) (logprobs - old_logprobs)^2``;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`.

    Raises:
      ValueError: if `beta` is negative, the aggregation is unknown or stands beside denominators as
        None, or shapes do not agree.

    References:
      Richemond et al., "Offline regularised reinforcement learning for large language models
      alignment", 2024. https://arxiv.org/abs/2405.19107

    Examples:
      >>> import jax.numpy as jnp
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
