"""Policy losses with an importance ratio per token: PPO, DPPO and SAPO."""

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
    """Clipped surrogate loss of PPO, to be minimised.

    With ``r = exp(logprobs - old_logprobs)``,

        l = max(-A min(r, guard), -A clip(r, 1 - clip_low, 1 + clip_high))
        l = min(l, -A clip_dual)                                   where A < 0, if clip_dual is set

    where `guard` is infinite if it is not set.

    Equal bounds give PPO and GRPO. A larger `clip_high` gives the "clip-higher" of DAPO, which lets
    the probability of rare tokens grow. A token has the gradient of ``-A r``, or 0 if the
    bound of its sign is *strictly* exceeded; where the two policies are equal it has the gradient
    of REINFORCE, even with a bound of 0.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      clip_low: lower bound ``1 - clip_low`` of the ratio, for tokens with a negative advantage.
      clip_high: upper bound ``1 + clip_high`` of it, for tokens with a positive advantage.
      clip_dual: the ratio, above 1, beyond which a token with a negative advantage has no gradient
        (dual clip); None disables it. Published settings are 3 and 10.
      guard: two-sided clip, above ``1 + clip_high``: the cap of the ratio in the unclipped term. A
        token with a negative advantage has no gradient beyond it, as with ``clip_dual=guard``; one
        with a positive advantage is clipped at `clip_high` first. None disables it. TRL's
        ``delta``; INTELLECT-2 uses 4.
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential; the gradient of a clamped token is 0. ``exp(20)`` is 5e8. The clamp keeps the
        loss finite where a probability vanishes under one policy (a ratio of 0 or infinity). None
        disables it, and such ratios follow IEEE arithmetic.
      importance_weights: factors on the token losses, of the shapes of `advantages`, such as
        corrections for a sampler that differs from the old policy; no gradient. None disables them.
      aggregation: reduction of the tokens' losses, see `aggregate`; None gives one loss per token.
      denominators: arguments of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`; none with ``aggregation=None``.

    Returns:
      `(loss, metrics)`. The loss is a scalar, or with ``aggregation=None`` one per token, 0 where
      the mask is false. The metrics are means over the tokens in the mask, whatever the
      aggregation, kept as `Mean` so that they add up over micro-batches and devices:

      * ``pg_clipfrac``: clipped fraction of the tokens, those whose loss a clip changes;
      * ``pg_clipfrac_lower``: the same for the dual clip and the guard;
      * ``ppo_kl``: ``old_logprobs - logprobs``, the k1 estimate of KL(old || current);
      * ``ratio``, ``ratio_squared``: of the two policies; 1 each while they are equal. The
        effective sample size, as a fraction, is ``ratio^2 / ratio_squared``;
      * ``ratio_clamped``: fraction of tokens with a log-ratio beyond `max_log_ratio`.

    Raises:
      ValueError: if a bound is negative, `clip_dual` is not above 1, or `guard` is not above
        ``1 + clip_high``, as it would clip positive advantages first (with `clip_high` as an
        array, only ``guard > 1`` is checked, and a lower guard does clip first); if the aggregation
        is unknown, or None with denominators.

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
    """Surrogate of `ppo_loss` and its statistics, per token."""
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
    """Policy loss of DPPO, which bounds the change of a token's probability instead of its ratio.

    With p and q the probabilities of a token under the current and the old policy, ``r = p / q``
    and sg the stop-gradient,

        l = -A sg(min(r, max_ratio)) log p        for kept tokens, and 0 for dropped ones

    A token is dropped if its probability has changed in the direction of its advantage by more than
    `max_divergence`, one distance or two as (down, up):

    | kind | distance | dropped |
    |---|---|---|
    | ``tv`` | ``|p - q|`` | beyond up with A > 0, p > q, or beyond down with A <= 0, p < q |
    | ``kl`` | ``q log(q/p) + (1-q) log((1-q)/(1-p))`` | the same |

    The ratio of a rare token changes more than its probability: from 0.01 to 0.03 is a ratio of 3
    and a distance of 0.02, from 0.9 to 0.95 a ratio of 1.06 and a distance of 0.05. PPO clips the
    first; DPPO may keep it and drop the second.

    The loss is to be minimised, but its value is a score-function estimator's, not a
    surrogate's: only the gradient, ``-A min(r, max_ratio)`` on kept tokens, is meaningful. In the
    paper the old policy is the sampler, so the ratio also corrects for the mismatch of trainer and
    sampler: apply no importance weights for it as well.

    Dropped tokens stay in the denominators.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that sampled them; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      kind: the distance: "tv" or "kl", verl's ``dppo_tv`` and ``dppo_kl``.
      max_divergence: maximum change, as a probability for "tv" and in nats for "kl": one distance,
        or two as (down, up). The two kinds differ in units, so there is no default. (verl reads the
        two from ``clip_ratio_low`` and ``clip_ratio_high``, which are 0.2.)
      max_ratio: the cap of the ratio, above 1; None disables it. 20 in verl (``clip_ratio_c``).
      max_log_ratio: the log-ratio is clamped to plus or minus this many nats before the
        exponential, and log p is floored this far below log q, where the gradient is 0. None
        disables both.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, where ``pg_clipfrac`` is the fraction of dropped tokens
      and ``pg_clipfrac_lower`` the fraction of kept tokens with a capped ratio.

    Raises:
      ValueError: if `kind` is unknown, `max_divergence` is negative or `max_ratio` is not above 1;
        if the aggregation is unknown, or None with denominators.

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
    # 0 times the logarithm of a probability of 0 would be NaN.
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
    """Mask of dropped tokens (`dppo_loss`); false outside the loss mask and for NaN."""
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
    log_first, log_second = (zero_masked(x, probability != 0) for x in (log_first, log_second))
    return probability * (log_first - log_second)


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
    """Policy loss of SAPO, with a smooth sigmoid gate on the ratio instead of a clip.

    With ``r = exp(logprobs - old_logprobs)``, of the token or of its row, and
    ``p = sigmoid(tau (r - 1))``,

        l = -A (4 / tau) p          tau = tau_positive where A > 0, tau_negative where A <= 0

    Its gradient is the gradient of ``-A r`` times ``4 p (1 - p)``. This factor is 1 at r = 1, so
    the first on-policy step is REINFORCE, and it decays smoothly away from 1. The loss *value* at r
    = 1 is ``-2 A / tau``, not ``-A``: only the gradient compares with other losses. A larger
    temperature makes the decay faster, by default for negative advantages.

    verl always uses `seq-mean-token-mean`, whatever is configured; TRL uses it too and counts empty
    rows (``empty_rows="count"``).

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      tau_positive: temperature for positive advantages; positive.
      tau_negative: temperature for negative advantages and 0; positive.
      level: level of the ratio, "token" or "sequence", as in `cispo_loss`.
      max_log_ratio: as in `ppo_loss`; None disables the clamp. verl clamps at 20, TRL does not.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, with these metrics

      * ``gate``: ``4 p (1 - p)``, the factor on the gradient;
      * ``ppo_kl``, ``ratio``, ``ratio_squared``, ``ratio_clamped``: as in `ppo_loss`, or at the
        sequence level as in `gspo_loss`.

    Raises:
      ValueError: if a temperature is not positive or `level` is unknown; if the aggregation is
        unknown, or None with denominators.

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
    # Near r = 1, r - 1 loses digits; expm1 keeps them.
    gate = jax.nn.sigmoid(tau * jnp.expm1(log_ratio))
    surrogate = -tokens.advantages * (4 / tau) * gate
    statistics = {"gate": 4 * gate * (1 - gate), **statistics}
    return reduce_surrogate(
        sapo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )
