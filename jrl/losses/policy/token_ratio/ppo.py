"""The clipped objective of PPO, with the bounds of GRPO and DAPO and the dual clip."""

from typing import Unpack

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    Tokens,
    clamped_log_ratio,
    distance,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean


def ppo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip_low: Bound = 0.2,
    clip_high: Bound = 0.2,
    clip_dual: Number | None = None,
    guard: Number | None = None,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Clipped policy loss of PPO, to be minimised.

    With ``r = exp(logprobs - old_logprobs)``,

        l = max(-A min(r, guard), -A clip(r, 1 - clip_low, 1 + clip_high))
        l = min(l, -A clip_dual)                                   where A < 0, if clip_dual is set

    where `guard` is infinite if it is not set.

    Equal bounds give PPO and GRPO; a larger `clip_high` gives the "clip-higher" of DAPO, which
    leaves rare tokens room to grow. The gradient of a token is that of ``-A r`` unless a bound is
    *strictly* exceeded, and then 0; in particular it is that of REINFORCE where the two policies
    are equal, even with a bound of 0.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: how far the ratio may fall below one before a negative advantage stops acting.
      clip_high: how far it may rise above one before a positive advantage stops acting.
      clip_dual: the ratio, greater than one, beyond which a negative advantage stops acting as
        well; None is off. Published settings are 3 and 10.
      guard: the two-sided guard, above ``1 + clip_high``: the ratio is capped at it inside the
        unclipped branch. A negative advantage then stops acting beyond it, just as with
        ``clip_dual=guard``; a positive one has met `clip_high` before. None is off. It is TRL's
        ``delta``; INTELLECT-2 has 4.
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, where the gradient is then 0; ``exp(20)`` is 5e8. Probabilities that vanish
        under one policy (a ratio of 0 or infinity) thereby give finite losses. None is off, and
        such ratios then give what IEEE arithmetic gives.
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`, such as
        corrections for a sampler that differs from the old policy; no gradient. None is off.
      aggregation: how to weigh tokens and sequences, see `aggregate`; None reduces nothing, and
        the loss is one per token.
      denominators: those of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`; none of them beside ``aggregation=None``.

    Returns:
      `(loss, metrics)`. The loss is one number, or one per token, 0 where the mask is false, with
      ``aggregation=None``. The metrics are means over the true tokens, whatever the aggregation,
      kept as `Mean` so that they add up over micro-batches and devices:

      * ``pg_clipfrac``: where a clip binds, that is, changes the loss;
      * ``pg_clipfrac_lower``: where the dual clip or the guard does;
      * ``ppo_kl``: ``old_logprobs - logprobs``, the k1 estimate of KL(old || current);
      * ``ratio``, ``ratio_squared``: of the two policies; 1 each while they are equal. The
        effective share of the sample is ``ratio^2 / ratio_squared``;
      * ``ratio_clamped``: where `max_log_ratio` was exceeded.

    Raises:
      ValueError: if a bound is negative, `clip_dual` is not above one, or `guard` is not above
        ``1 + clip_high``, since it would then bound positive advantages in its place (of a
        `clip_high` given as an array that cannot be checked: a lower guard acts as said); if the
        aggregation is unknown or stands beside denominators as None; if shapes do not agree.

    References:
      Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 7.
      https://arxiv.org/abs/1707.06347
      Ye et al., "Mastering complex control in MOBA games", 2019, eq. 4 (dual clip).
      https://arxiv.org/abs/1912.09729
      Yu et al., "DAPO", 2025, section 3.1 (clip-higher). https://arxiv.org/abs/2503.14476
      Prime Intellect, "INTELLECT-2", 2025 (guard). https://arxiv.org/abs/2505.07291

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> ratio, ones = jnp.array([0.5, 1.0, 1.25, 4.0]), jnp.ones(4)
      >>> arrays = jnp.log(ratio), 0 * ones, ones, ones
      >>> ppo_loss(*arrays, clip_high=0.25, aggregation=None)[0].tolist()
      [-0.5, -1.0, -1.25, -1.25]
      >>> old = jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.25]]))
      >>> mask = jnp.array([[1, 1], [1, 0]])
      >>> advantages = jnp.array([[1.0], [-1.0]])
      >>> step = jax.value_and_grad(ppo_loss, has_aux=True)
      >>> (loss, metrics), gradient = step(old, old, advantages, mask)
      >>> gradient.round(3).tolist(), float(metrics["pg_clipfrac"].value())
      ([[-0.3330000042915344, -0.3330000042915344], [0.3330000042915344, 0.0]], 0.0)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    surrogate, statistics = clipped(tokens, clip_low, clip_high, clip_dual, max_log_ratio, guard)
    return reduce_surrogate(
        ppo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def clipped(
    tokens: Tokens,
    clip_low: Bound,
    clip_high: Bound,
    clip_dual: Number | None,
    max_log_ratio: Number | None,
    guard: Number | None = None,
) -> tuple[Float[Array, "*batch time"], dict[str, Float[Array, "*batch time"]]]:
    """The surrogate of `ppo_loss`, and its statistics for each token."""
    low, high = distance("clip_low", clip_low, tokens), distance("clip_high", clip_high, tokens)
    dual = settings.optional(
        "clip_dual", clip_dual, "must be above 1, such as 3; None is off.", above=1
    )
    guard = settings.optional(
        "guard",
        guard,
        "must be above 1 + clip_high, such as 4, or it clips first; None is off.",
        above=1 if isinstance(high, Array) else 1 + high,
    )
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    ratio, advantages = jnp.exp(log_ratio), tokens.advantages

    # Selected by comparison rather than by jnp.maximum, which halves the gradient of a tie.
    beyond = jnp.zeros_like(tokens.mask) if guard is None else ratio > guard
    unclipped = -advantages * (ratio if guard is None else jnp.where(beyond, guard, ratio))
    bounded = -advantages * jnp.clip(ratio, 1 - low, 1 + high)
    binds = bounded > unclipped
    surrogate = jnp.where(binds, bounded, unclipped)
    binds_lower = beyond & (advantages < 0) & ~binds
    if dual is not None:
        ceiling = -advantages * dual
        binds_dual = (advantages < 0) & (surrogate > ceiling)
        surrogate = jnp.where(binds_dual, ceiling, surrogate)
        binds_lower = binds_lower | binds_dual
    return surrogate, {
        "pg_clipfrac": binds.astype(ratio.dtype),
        "pg_clipfrac_lower": binds_lower.astype(ratio.dtype),
        **statistics,
    }
