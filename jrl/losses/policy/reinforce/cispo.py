"""CISPO: where a clip takes a token's gradient away, a clipped weight makes it smaller."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Number
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    RatioLevel,
    distance,
    floored_logprobs,
    log_ratio_at,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean


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
    """Loss of CISPO: REINFORCE with a clipped importance weight.

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
        ratios, as in `gspo_loss`; a row must then be one whole response. (TRL:
        ``importance_sampling_level``.)
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, and the log-probability is no more than this below the old one, where the
        gradient is then 0; None is off. verl clamps at 20, TRL does not.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``pg_clipfrac``: where the weight was clipped, whatever the advantage; TRL counts positive
        advantages only;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`, or, at the
        level of sequences, as in `gspo_loss`; before the clip.

    Raises:
      ValueError: if a bound is negative, `level` or the aggregation is unknown, denominators stand
        beside ``aggregation=None``, or shapes do not agree.

    References:
      MiniMax, "MiniMax-M1", 2025, eqs. 4 and 5. https://arxiv.org/abs/2506.13585

    Examples:
      >>> import jax.numpy as jnp
      >>> log_ratio, ones = jnp.array([0.1, 0.5]), jnp.ones(2)
      >>> logprobs = jnp.array([-1.0, -0.2])
      >>> arrays = logprobs, logprobs - log_ratio, ones, ones
      >>> losses, _ = cispo_loss(*arrays, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses]
      [1.1052, 0.24]
      >>> logprobs, old, ones = jnp.array([-1.0, -0.5]), jnp.array([-1.0, -1.5]), jnp.ones(2)
      >>> loss, metrics = cispo_loss(logprobs, old, ones, ones, clip_high=1.0)
      >>> float(loss), float(metrics["pg_clipfrac"].value())
      (1.0, 0.5)
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
