"""Policy losses with a ratio for each token: PPO, DPPO and SAPO."""

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, PerToken, TokenMask, zero_masked
from jrl.losses.policy.tokens import (
    Bound,
    Loss,
    RatioLevel,
    Statistics,
    Tokens,
    clamped_log_ratio,
    distance,
    log_ratio_at,
    prepare,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean

__all__ = ["ppo_loss", "sapo_loss", "dppo_loss", "ProbabilityDistance"]  # noqa: RUF022

ProbabilityDistance = Literal["tv", "kl"]


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
        aggregation is unknown or stands beside denominators as None.

    References:
      Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 7.
      https://arxiv.org/abs/1707.06347
      Ye et al., "Mastering complex control in MOBA games", 2019, eq. 4 (dual clip).
      https://arxiv.org/abs/1912.09729
      Yu et al., "DAPO", 2025, section 3.1 (clip-higher). https://arxiv.org/abs/2503.14476
      Prime Intellect, "INTELLECT-2", 2025 (guard). https://arxiv.org/abs/2505.07291

    Examples:
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
) -> tuple[PerToken, Statistics]:
    """The surrogate of `ppo_loss`, and its statistics for each token."""
    low, high = distance("clip_low", clip_low, tokens), distance("clip_high", clip_high, tokens)
    rule = "must be above 1, such as 3; None is off."
    dual = settings.optional("clip_dual", clip_dual, rule, above=1)
    rule = "must be above 1 + clip_high, such as 4, or it clips first; None is off."
    least = 1 if isinstance(high, Array) else 1 + high
    guard = settings.optional("guard", guard, rule, above=least)
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


def dppo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    kind: ProbabilityDistance,
    max_divergence: settings.Sides,
    max_ratio: Number | None = 20.0,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of DPPO, to be minimised.

    With p and q the probabilities of a token under the current and the old policy, ``r = p / q``
    and sg the stop-gradient,

        l = -A sg(min(r, max_ratio)) log p        while the token is kept, and 0 otherwise

    A token is dropped if its probability has moved away from the old one, in the direction in which
    its advantage pushes it, by more than `max_divergence`, which may be two distances, (down, up):

    | kind | distance | dropped |
    |---|---|---|
    | ``tv`` | ``|p - q|`` | beyond up with A > 0, p > q, or beyond down with A <= 0, p < q |
    | ``kl`` | ``q log(q/p) + (1-q) log((1-q)/(1-p))`` | the same |

    The ratio of a rare token moves far while its probability hardly does: from 0.01 to 0.03 is a
    ratio of 3 and a distance of 0.02, from 0.9 to 0.95 a ratio of 1.06 and a distance of 0.05. PPO
    clips the first, this may keep it and drop the second.

    The value is that of a score-function estimate, not of a surrogate: only its gradient,
    ``-A min(r, max_ratio)`` where kept, means something. In the paper the old policy is the sampler
    itself, so that the ratio corrects for the mismatch, too: weigh it no second time.

    Dropped tokens have a loss of 0 and still count in the denominators.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that sampled them; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      kind: the distance: "tv" or "kl", verl's ``dppo_tv`` and ``dppo_kl``.
      max_divergence: how far a probability may move, a probability for "tv" and nats for "kl": one
        distance, or two as (down, up). One number means different things to the two kinds, so there
        is no default. (verl reads the two from ``clip_ratio_low`` and ``clip_ratio_high``, which
        are 0.2.)
      max_ratio: the cap of the ratio, above one; None is off. 20 in verl (``clip_ratio_c``).
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, and so is log p from below, where the gradient is then 0. None is off.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, where ``pg_clipfrac`` is the share of tokens that were
      dropped and ``pg_clipfrac_lower`` that of those whose ratio was capped.

    Raises:
      ValueError: if `kind` or the aggregation is unknown, `max_divergence` negative or `max_ratio`
        not above one, or denominators stand beside ``aggregation=None``.

    References:
      Qi et al., "Rethinking the trust region in LLM reinforcement learning", 2026.
      https://arxiv.org/abs/2602.04879

    Examples:
      >>> p, old, ones = jnp.array([0.03, 0.95]), jnp.array([0.01, 0.9]), jnp.ones(2)
      >>> def total(logprobs):
      ...     arrays = (logprobs, jnp.log(old), ones, ones)
      ...     return dppo_loss(*arrays, kind="tv", max_divergence=0.03, aggregation="token-sum")
      >>> slopes, metrics = jax.grad(total, has_aux=True)(jnp.log(p))
      >>> [round(float(slope), 4) for slope in -slopes], float(metrics["pg_clipfrac"].value())
      ([3.0, 0.0], 0.5)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    settings.choice("kind", kind, ProbabilityDistance)
    bounds = settings.distance_pair("max_divergence", max_divergence)
    rule = "must be above 1, such as 20; None is off."
    max_ratio = settings.optional("max_ratio", max_ratio, rule, above=1)
    max_log_ratio = settings.optional_distance("max_log_ratio", max_log_ratio)
    current = jax.lax.stop_gradient(tokens.logprobs)
    log_ratio, statistics = clamped_log_ratio(tokens._replace(logprobs=current), max_log_ratio)
    weight = ratio = jnp.exp(log_ratio)
    if max_ratio is not None:
        weight = jnp.minimum(ratio, max_ratio)
    dropped = _dropped(tokens._replace(logprobs=current), kind, bounds)
    # The logarithm of a probability of 0 would meet a factor of 0, and its product is no number.
    logprobs = tokens.logprobs
    if max_log_ratio is not None:
        floor = jnp.maximum(tokens.old_logprobs - max_log_ratio, jnp.finfo(logprobs.dtype).min)
        logprobs = jnp.where(logprobs < floor, floor, logprobs)
    surrogate = zero_masked(-tokens.advantages * weight * logprobs, ~dropped)
    statistics = {
        "pg_clipfrac": dropped.astype(ratio.dtype),
        "pg_clipfrac_lower": ((ratio > weight) & ~dropped).astype(ratio.dtype),
        **statistics,
    }
    return reduce_surrogate(
        dppo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def _dropped(
    tokens: Tokens, kind: ProbabilityDistance, bounds: tuple[settings.Checked, settings.Checked]
) -> TokenMask:
    """Mask of the tokens whose probability moved too far; false for masked tokens and for NaN."""
    down, up = bounds
    p, q = jnp.exp(tokens.logprobs), jnp.exp(tokens.old_logprobs)
    rises = tokens.advantages > 0
    falls = tokens.advantages <= 0
    if kind == "tv":
        return (rises & (p - q > up)) | (falls & (p - q < -down))
    sampled = _relative(q, tokens.old_logprobs, tokens.logprobs)
    others = -jnp.expm1(tokens.old_logprobs), -jnp.expm1(tokens.logprobs)
    moved = sampled + _relative(others[0], *(jnp.log(jnp.maximum(x, 0)) for x in others))
    return (rises & (p > q) & (moved > up)) | (falls & (p < q) & (moved > down))


def _relative(probability: PerToken, log_first: PerToken, log_second: PerToken) -> PerToken:
    """``probability * (log_first - log_second)``, and 0 where the probability is 0."""
    return probability * zero_masked(log_first - log_second, probability != 0)


def sapo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    tau_positive: Number = 1.0,
    tau_negative: Number = 1.05,
    level: RatioLevel = "token",
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "seq-mean-token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Loss of SAPO, whose gate closes gradually as the ratio leaves one.

    With ``r = exp(logprobs - old_logprobs)``, of the token or of its row, and
    ``p = sigmoid(tau (r - 1))``,

        l = -A (4 / tau) p          tau = tau_positive where A > 0, tau_negative where A <= 0

    Its gradient is that of ``-A r`` times ``4 p (1 - p)``, which is 1 at r = 1, so the first
    on-policy step is REINFORCE; far from 1 it fades instead of stopping. The loss *value* at r = 1
    is ``-2 A / tau``, not ``-A``: only the gradient compares with other losses. The larger
    temperature makes the gate close earlier for negative advantages.

    verl takes `seq-mean-token-mean` whatever is configured; TRL takes the same and counts empty
    rows (``empty_rows="count"``).

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      tau_positive: temperature where the advantage is positive; positive.
      tau_negative: temperature where the advantage is negative or 0; positive.
      level: "token" or "sequence", over what the ratio is taken, as in `cispo_loss`.
      max_log_ratio: as in `ppo_loss`; None is off. verl clamps at 20, TRL does not.
      importance_weights: as in `ppo_loss`; None is off.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``gate``: ``4 p (1 - p)``, the share of the gradient that the gate lets through;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`, or, at the
        level of sequences, as in `gspo_loss`.

    Raises:
      ValueError: if a temperature is not positive, `level` or the aggregation is unknown, or
        denominators stand beside ``aggregation=None``.

    References:
      Gao et al., "Soft adaptive policy optimization", 2025. https://arxiv.org/abs/2511.20347

    Examples:
      >>> ratio, ones = jnp.array([0.0, 1.0, 3.0]), jnp.ones(3)
      >>> losses, _ = sapo_loss(jnp.log(ratio), 0 * ones, ones, ones, aggregation=None)
      >>> [round(float(loss), 4) for loss in losses]
      [-1.0758, -2.0, -3.5232]
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    positive, negative = (
        settings.number(name, tau, "is a temperature and must be positive, such as 1.0.", above=0)
        for name, tau in (("tau_positive", tau_positive), ("tau_negative", tau_negative))
    )
    log_ratio, statistics = log_ratio_at(level, tokens, max_log_ratio)
    tau = jnp.where(tokens.advantages > 0, positive, negative).astype(log_ratio.dtype)
    # What tau (r - 1) is near r = 1 is a small difference, which expm1 keeps exact.
    gate = jax.nn.sigmoid(tau * jnp.expm1(log_ratio))
    surrogate = -tokens.advantages * (4 / tau) * gate
    statistics = {"gate": 4 * gate * (1 - gate), **statistics}
    return reduce_surrogate(
        sapo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
