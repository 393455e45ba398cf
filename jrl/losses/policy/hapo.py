"""HAPO's policy loss: PPO with advantages and clip bounds that depend on the policy's entropy."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, PerToken, as_floats, check_shapes, zero_masked
from jrl.losses.policy.hapo_signal import check_strength
from jrl.losses.policy.token_ratio import clipped
from jrl.losses.policy.tokens import Bound, Loss, Tokens, distance, prepare, reduce_surrogate
from jrl.losses.reduction import Aggregation, Denominators, Mean

__all__ = ["asymmetric_clip_bounds", "redistributed_advantages", "hapo_loss"]  # noqa: RUF022


def asymmetric_clip_bounds(
    signal: Float[ArrayLike, "*shape"],
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.28,
    strength: Number = 1.0,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """HAPO's clip bounds: a wider upper bound at high entropy, a wider lower one at low entropy.

        signal > 0:   clip_low,                          clip_high (1 + strength signal)
        signal <= 0:  clip_low (1 - strength signal),    clip_high

    The defaults are the paper's; the released scripts set `clip_high` to 0.2.

    Args:
      signal: from `entropy_signal`.
      clip_low: lower clip bound at a signal of 0 or more.
      clip_high: upper clip bound at a signal of 0 or less.
      strength: 0 disables the adaptation; with 1 each bound may double.

    Returns:
      `(clip_low, clip_high)`, one each per token (gradient stopped), in the form that `ppo_loss`
      takes.

    Raises:
      ValueError: if a bound or `strength` is negative.

    References:
      As for `entropy_statistics`; asymmetric adaptive clipping.

    Examples:
      >>> low, high = asymmetric_clip_bounds(jnp.array([-1.0, 0.0, 1.0]), clip_high=0.25)
      >>> low.tolist(), high.tolist()
      ([0.4000000059604645, 0.20000000298023224, 0.20000000298023224], [0.25, 0.25, 0.5])
    """
    clip_low = settings.distance("clip_low", clip_low)
    clip_high = settings.distance("clip_high", clip_high)
    strength = check_strength("strength", strength)
    (signal,) = as_floats(jax.lax.stop_gradient(signal))
    return (
        clip_low * (1 + strength * jnp.maximum(-signal, 0)),
        clip_high * (1 + strength * jnp.maximum(signal, 0)),
    )


def redistributed_advantages(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    signal: Float[ArrayLike, "*batch time"],
    *,
    clip_low: Bound = 0.2,
    clip_high: Bound = 0.28,
    strength: Number = 1.0,
) -> Float[Array, "*batch time"]:
    """HAPO's redistributed advantages: amplified at high entropy, damped at low entropy.

    With ``r = exp(logprobs - old_logprobs)`` and a zone from ``1 - clip_low / 2`` to
    ``1 + clip_high / 2``,

        A (1 + strength signal)    where signal > 0 and r is outside the zone,
                                   or signal <= 0 and r is inside it
        A                          elsewhere, and on the edges of the zone

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      signal: from `entropy_signal`; no gradient.
      clip_low: of the zone. `hapo_loss` passes the adapted bounds of `asymmetric_clip_bounds`, as
        the released code does.
      clip_high: likewise.
      strength: from 0 (no change) to 1, at which a token with a signal of -1, the lowest entropy,
        has an advantage of 0. Larger strengths would flip signs.

    Returns:
      One advantage per token (gradient stopped); 0 where the mask is false.

    Raises:
      ValueError: if a bound is negative or `strength` is not in [0, 1].

    References:
      As for `entropy_statistics`; differential advantage redistribution.

    Examples:
      >>> ratio, signal = jnp.array([1.0, 0.7, 1.3, 1.0]), jnp.array([-0.5, -0.5, 0.5, 0.5])
      >>> ones = jnp.ones(4)
      >>> redistributed_advantages(jnp.log(ratio), 0 * ones, ones, ones, signal).tolist()
      [0.5, 1.0, 1.5, 1.0]
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    signal = _prepare_signal(tokens, signal)
    low, high = distance("clip_low", clip_low, tokens), distance("clip_high", clip_high, tokens)
    return _redistribute(tokens, signal, low, high, strength)


def hapo_loss(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    signal: Float[ArrayLike, "*batch time"],
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.28,
    clip_strength: Number = 1.0,
    redistribution: Number = 1.0,
    clip_dual: Number | None = 10.0,
    max_log_ratio: Number | None = 20.0,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None = None,
    aggregation: Aggregation | None = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Loss, dict[str, Mean]]:
    """Policy loss of HAPO: PPO with entropy-dependent clip bounds and advantages.

    In the order of the released code: `asymmetric_clip_bounds` from the signal, then
    `redistributed_advantages` with the zone of those bounds, then `ppo_loss` with both. No
    gradient passes through the ratio of the redistribution. With ``clip_strength=0`` and
    ``redistribution=0`` it is `ppo_loss` exactly.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the old policy, the denominator of the ratio; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient. HAPO's are
        normalised over the tokens of a group.
      mask: true on sampled tokens.
      signal: from `entropy_signal`, with the current policy's entropy and the statistics of the
        whole batch; no gradient.
      clip_low: lower clip bound, before it is adapted.
      clip_high: upper clip bound, before it is adapted: 0.28 in the paper, 0.2 in the released
        scripts.
      clip_strength: the strength of `asymmetric_clip_bounds`; 0 disables the adaptation.
      redistribution: the strength of `redistributed_advantages`; 0 disables it.
      clip_dual: the ratio beyond which a token with a negative advantage has no gradient (dual
        clip); None disables it.
      max_log_ratio: as in `ppo_loss`; None disables the clamp.
      importance_weights: as in `ppo_loss`; None disables them.
      aggregation: as in `ppo_loss`; None gives one loss per token.
      denominators: as in `ppo_loss`.

    Returns:
      `(loss, metrics)` as of `ppo_loss`, and ``redistributed``, the fraction of tokens whose
      advantage was amplified or damped.

    Raises:
      ValueError: if a bound or strength is out of its range; if the aggregation is unknown, or None
        with denominators.

    References:
      "Heterogeneous adaptive policy optimization", 2025. https://arxiv.org/abs/2509.16591
      https://github.com/starriver030515/HAPO

    Examples:
      >>> ratio, signal = jnp.array([1.0, 1.5, 1.5]), jnp.array([-0.5, 0.0, 1.0])
      >>> ones = jnp.ones(3)
      >>> arrays = jnp.log(ratio), 0 * ones, ones, ones, signal
      >>> losses, metrics = hapo_loss(*arrays, clip_high=0.25, aggregation=None)
      >>> losses.tolist(), round(float(metrics["redistributed"].value()), 4)
      ([-0.5, -1.25, -3.0], 0.6667)
    """
    tokens = prepare(logprobs, old_logprobs, advantages, mask)
    signal = _prepare_signal(tokens, signal)
    clip_strength = check_strength("clip_strength", clip_strength)
    low, high = asymmetric_clip_bounds(
        signal, clip_low=clip_low, clip_high=clip_high, strength=clip_strength
    )
    advantages = _redistribute(tokens, signal, low, high, redistribution, "redistribution")
    changed = advantages != tokens.advantages
    surrogate, statistics = clipped(
        tokens._replace(advantages=advantages), low, high, clip_dual, max_log_ratio
    )
    statistics = {**statistics, "redistributed": changed.astype(surrogate.dtype)}
    return reduce_surrogate(
        hapo_loss, surrogate, statistics, tokens, aggregation, importance_weights, denominators
    )


def _redistribute(
    tokens: Tokens,
    signal: PerToken,
    low: settings.Checked,
    high: settings.Checked,
    strength: Number,
    name: str = "strength",
) -> PerToken:
    """Advantages of `redistributed_advantages`."""
    rule = "must be from 0, which is off, to 1."
    strength = settings.number(name, strength, rule, at_least=0, at_most=1)
    # Only compared, so it has no gradient.
    ratio = jnp.exp(tokens.logprobs - tokens.old_logprobs)
    bottom, top = 1 - low / 2, 1 + high / 2
    unmoved = (ratio >= bottom) & (ratio <= top)
    moved = (ratio <= bottom) | (ratio >= top)
    # The unchanged tokens are selected, not the changed ones, so that a NaN signal propagates.
    stays = ((signal > 0) & unmoved) | ((signal <= 0) & moved)
    return tokens.advantages * jnp.where(stays, 1, 1 + strength * signal)


def _prepare_signal(tokens: Tokens, signal: Float[ArrayLike, "*batch time"]) -> PerToken:
    """Signal in the precision of the tokens, 0 outside the mask (gradient stopped)."""
    check_shapes(logprobs=tokens.logprobs, signal=signal)
    signal = jax.lax.stop_gradient(jnp.asarray(signal)).astype(tokens.logprobs.dtype)
    return zero_masked(signal, tokens.mask)
