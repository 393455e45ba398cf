"""CISPO: where a clip takes a token's gradient away, a clipped weight makes it smaller."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Number
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    RatioLevel,
    Tokens,
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
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`; no
        gradient. None is off.
      aggregation: how to weigh tokens and sequences, see `aggregate`; None reduces nothing, and
        the loss is one per token.
      denominators: those of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`; none of them beside ``aggregation=None``.

    Returns:
      `(loss, metrics)`. The loss is one number, or one per token, 0 where the mask is false, with
      ``aggregation=None``. The metrics are means over the true tokens, kept as `Mean`.

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


def _clipped_weight(
    tokens: Tokens,
    clip_low: Bound | None,
    clip_high: Bound | None,
    level: RatioLevel,
    max_log_ratio: Number | None,
) -> tuple[Float[Array, "*batch time"], dict[str, Float[Array, "*batch time"]]]:
    """The surrogate of `cispo_loss`, and its statistics for each token."""
    log_ratio, statistics = log_ratio_at(level, tokens, max_log_ratio)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    weight = ratio
    if clip_low is not None:
        weight = jnp.maximum(weight, 1 - distance("clip_low", clip_low, tokens))
    if clip_high is not None:
        weight = jnp.minimum(weight, 1 + distance("clip_high", clip_high, tokens))
    surrogate = -weight * tokens.advantages * floored_logprobs(tokens, max_log_ratio)
    return surrogate, {"pg_clipfrac": (weight != ratio).astype(ratio.dtype), **statistics}
