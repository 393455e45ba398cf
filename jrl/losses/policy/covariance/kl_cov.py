"""KL-Cov: a penalty on the tokens through which entropy collapses."""

from typing import Unpack

import jax
import jax.numpy as jnp
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
from jrl.losses.policy.order import top_k_mask
from jrl.losses.policy.tokens import Loss, clamped_log_ratio, prepare, reduce_surrogate
from jrl.losses.reduction import Aggregation, Denominators, Mean


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
    """Policy loss of KL-Cov: unclipped, with a penalty where the covariance is highest.

        l = -A r + coefficient |logprobs - old_logprobs|    on the chosen tokens
            -A r                                            elsewhere

    Chosen are the ``max(1, floor(fraction N))`` tokens of highest `covariances`, N the true tokens
    of the batch; of equal ones the earlier. The penalty's gradient is the sign of the difference
    and 0 where there is none, so that the first on-policy step is REINFORCE.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      fraction: how much of the batch is chosen, from 0, which is none, to 1. The paper has 2e-3 for
        a model of 7B and 2e-4 for 32B; the latter is verl's default.
      coefficient: of the penalty: 1 in the recipe, 0.1 in verl's dataclass.
      chosen: true on the tokens that shall be penalised, chosen beforehand. None chooses among the
        tokens given here by their own `covariances`, which is right for a **whole batch**: of each
        micro-batch at least one token would be chosen, as verl does.
      max_log_ratio: as in `ppo_loss`, on the penalty as well; None is off.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, without the metrics of clips, which do not exist, and with
      ``cov_frac``, the share of tokens that were chosen.

    Raises:
      ValueError: if `fraction` is not in [0, 1] or `coefficient` is negative, the aggregation is
        unknown or stands beside denominators as None, or shapes do not agree.

    References:
      Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
      2025. https://arxiv.org/abs/2505.22617

    Examples:
      >>> import jax.numpy as jnp
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
        number = number_chosen(tokens.mask, fraction)
        covariance = covariances(tokens.logprobs, tokens.advantages, tokens.mask)
        picked = top_k_mask(number, tokens.mask, -covariance)
    else:
        picked = as_chosen(chosen, tokens)
    surrogate = -tokens.advantages * jnp.exp(log_ratio)
    # By its sign, which is 0 at 0: the derivative of jnp.abs is 1 there.
    penalty = coefficient * log_ratio * jax.lax.stop_gradient(jnp.sign(log_ratio))
    surrogate = jnp.where(picked, surrogate + penalty, surrogate)
    statistics = {**statistics, "cov_frac": picked.astype(surrogate.dtype)}
    return reduce_surrogate(
        kl_cov_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
