"""HAPO: temperature, advantages and clipping that depend on how undecided the policy was.

All of it starts from one signal, the entropy of each token against that of the batch.
"""

from dataclasses import dataclass
from typing import Generic, Literal, Unpack, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses.arrays import Number, as_floats, as_mask, check_shapes, keep
from jrl.losses.policy.order import ascending, at, number, share
from jrl.losses.policy.ppo import clipped
from jrl.losses.policy.tokens import (
    Bound,
    Tokens,
    check_distance,
    clean,
    distance,
    reduce_surrogate,
)
from jrl.losses.reduction import Aggregation, Denominators, Leaf, Mean, divide

EntropySign = Literal["intended", "release"]

ENTROPY_FLOOR = 1e-8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EntropyStatistics(Generic[Leaf]):
    """What turns entropies into HAPO's signal: the pivot of a batch, its scale and its extremes.

    Made by `entropy_statistics` from a whole batch and then handed to every piece of it, so that
    micro-batches and devices agree, or to the sampler of the next step.

    Attributes:
      pivot: the quantile of log H from which distances are measured, in log nats.
      scale: the root mean square of ``log H - pivot``.
      h_max: the greatest standardised entropy of the batch.
      h_min: the least.
    """

    pivot: Leaf
    scale: Leaf
    h_max: Leaf
    h_min: Leaf


def entropy_statistics(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    quantile: Number = 0.8,
) -> EntropyStatistics[Array]:
    """The pivot, scale and extremes of a batch's log-entropies, for HAPO's signal.

    With ``x = log max(H, 1e-8)`` over the N true tokens, in increasing order,

        pivot = x[round(quantile (N - 1))]          the nearest order statistic, halves to even
        scale = sqrt(mean((x - pivot)^2))           around the pivot, not around the mean
        h_max, h_min = the extremes of (x - pivot) / scale

    The default makes the top fifth of the tokens count as undecided. It follows the released code;
    the paper writes sigma(log H) for the scale.

    Args:
      entropy: of the policy at each token, in nats; no gradient. The **whole batch**: statistics
        of a piece are not those of the batch, and they do not add up.
      mask: true on sampled tokens.
      quantile: from 0 to 1; the paper's rho.

    Returns:
      The record; all 0 if no token is true, and a scale and extremes of 0 if all entropies agree.

    Raises:
      ValueError: if `quantile` is not in [0, 1].

    References:
      "Heterogeneous adaptive policy optimization", 2025. https://arxiv.org/abs/2509.16591

    >>> import jax.numpy as jnp
    >>> entropy = jnp.array([0.02, 0.05, 0.1, 0.3, 0.6, 0.9, 1.2, 2.0])
    >>> statistics = entropy_statistics(entropy, jnp.ones(8))
    >>> round(float(statistics.pivot), 4), round(float(statistics.scale), 4)
    (0.1823, 2.115)
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile={quantile} must be from 0 to 1, such as 0.8.")
    log_entropy, mask = _log_entropy(entropy, mask)
    tokens = number(mask)
    whole, rest, denominator = share(quantile, jnp.maximum(tokens - 1, 0))
    half_up = (2 * rest > denominator) | ((2 * rest == denominator) & (whole % 2 == 1))
    index = jnp.where(tokens == 0, -1, jnp.where(half_up, whole + 1, whole))
    pivot = at(ascending(log_entropy, mask), index)
    centred = keep(log_entropy - pivot, mask)
    scale = jnp.sqrt(divide(jnp.sum(centred**2), tokens))
    standardized = _standardize(log_entropy, mask, pivot, scale)
    infinity = jnp.asarray(jnp.inf, standardized.dtype)
    h_max = jnp.max(jnp.where(mask, standardized, -infinity))
    h_min = jnp.min(jnp.where(mask, standardized, infinity))
    some = tokens > 0
    return EntropyStatistics(pivot, scale, keep(h_max, some), keep(h_min, some))


def standardized_entropy(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    quantile: Number = 0.8,
    statistics: EntropyStatistics[Array] | None = None,
) -> Float[Array, "*batch time"]:
    """HAPO's h: the log-entropy of each token in scales of its batch, 0 at the pivot.

        h = (log H - pivot) / scale

    Positive where the policy is more undecided than at the `quantile` of the batch. The paper's
    temperature reads it as it is; everything else reads `entropy_signal`, which bounds it.

    Args:
      entropy: of the policy at each token, in nats, floored at 1e-8; no gradient.
      mask: true on sampled tokens.
      quantile: see `entropy_statistics`; without effect where `statistics` is given.
      statistics: those of the whole batch, or of the step before. None takes them from the arrays
        given here, which must then be the **whole batch**; the released code takes those of each
        micro-batch instead, so its loss depends on how a batch is cut.

    Returns:
      One number per token; 0 where the mask is false, and everywhere if the scale is 0.

    Raises:
      ValueError: if `quantile` is not in [0, 1].

    References:
      As for `entropy_statistics`.

    >>> import jax.numpy as jnp
    >>> entropy = jnp.array([0.02, 0.05, 0.1, 0.3, 0.6, 0.9, 1.2, 2.0])
    >>> h = standardized_entropy(entropy, jnp.ones(8))
    >>> [round(float(x), 4) for x in h[-3:]]
    [-0.136, 0.0, 0.2415]
    """
    if statistics is None:
        statistics = entropy_statistics(entropy, mask, quantile=quantile)
    log_entropy, mask = _log_entropy(entropy, mask)
    pivot, scale = (
        jax.lax.stop_gradient(jnp.asarray(x, log_entropy.dtype))
        for x in (statistics.pivot, statistics.scale)
    )
    return _standardize(log_entropy, mask, pivot, scale)


def entropy_signal(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    quantile: Number = 0.8,
    sign: EntropySign = "intended",
    statistics: EntropyStatistics[Array] | None = None,
) -> Float[Array, "*batch time"]:
    """HAPO's signal: how undecided the policy was at each token, from -1 to 1.

    With h of `standardized_entropy`,

        signal = h / h_max      where h > 0
                 h / |h_min|    where h <= 0

    | sign | where h is negative |
    |---|---|
    | ``intended`` | negative too: the range [-1, 1] of the paper's text |
    | ``release`` | positive: the released code divides by h_min itself |

    Args:
      entropy: of the policy at each token, in nats, floored at 1e-8; no gradient.
      mask: true on sampled tokens.
      quantile: see `entropy_statistics`; without effect where `statistics` is given.
      sign: which of the two; "release" is for reproducing that code.
      statistics: those of the whole batch, or of the step before. None takes them from the arrays
        given here, which must then be the **whole batch**. With those of another batch a token may
        lie beyond the extremes, and its signal beyond 1 in size.

    Returns:
      One number per token, without a gradient; 0 where the mask is false.

    Raises:
      ValueError: if `quantile` is not in [0, 1] or `sign` is unknown.

    References:
      As for `entropy_statistics`; eq. 6.

    >>> import jax.numpy as jnp
    >>> entropy = jnp.array([[0.25, 1.0, 1.0], [1.0, 2.0, 0.0]])
    >>> mask = jnp.array([[1, 1, 1], [1, 1, 0]])
    >>> entropy_signal(entropy, mask).tolist()
    [[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    if sign not in get_args(EntropySign):
        raise ValueError(f"sign={sign!r} is neither 'intended' nor 'release'.")
    if statistics is None:
        statistics = entropy_statistics(entropy, mask, quantile=quantile)
    h = standardized_entropy(entropy, mask, statistics=statistics)
    up, down = (
        jax.lax.stop_gradient(jnp.asarray(x, h.dtype)) for x in (statistics.h_max, statistics.h_min)
    )
    down = jnp.abs(down) if sign == "intended" else down
    extreme = jnp.where(h > 0, up, down)
    return h / jnp.where(extreme == 0, jnp.ones_like(extreme), extreme)


def adaptive_temperature(
    signal: Float[ArrayLike, "*shape"],
    *,
    base: Number = 1.0,
    strength: Number = 0.05,
    max_signal: Number | None = 1.0,
) -> Float[Array, "*shape"]:
    """HAPO's temperature for sampling the next token: hotter where the policy is undecided.

        T = base (1 + strength clip(signal, -max_signal, max_signal))

    The defaults are those of the released code, whose signal is `entropy_signal` with the
    statistics of the training step before (the first step samples at `base`). The paper has
    ``T = base (1 + 0.1 h)``: give it `standardized_entropy`, ``strength=0.1`` and
    ``max_signal=None``.

    Tokens sampled at T are mildly off-policy for a trainer that computes log-probabilities at
    another temperature: keep the sampler's own, at T, and correct with them.

    Args:
      signal: of `entropy_signal`, for the distribution that is about to be sampled from.
      base: the temperature of a signal of 0, above 0.
      strength: how much a signal of 1 adds, as a share of `base`; 0 is a constant temperature.
      max_signal: the size to which the signal is clipped; None is off, and T can then fall to 0
        or below where the signal is less than ``-1 / strength``.

    Returns:
      One temperature per signal, without a gradient.

    Raises:
      ValueError: if `base` is not positive, `strength` is negative, or together with `max_signal`
        they allow a temperature of 0.

    References:
      As for `entropy_statistics`; adaptive temperature sampling.

    >>> import jax.numpy as jnp
    >>> adaptive_temperature(jnp.array([-1.0, 0.0, 2.0]), strength=0.25).tolist()
    [0.75, 1.0, 1.25]
    """
    if base <= 0:
        raise ValueError(f"base={base} is a temperature and must be above 0, such as 1.")
    _check_strength("strength", strength)
    if max_signal is not None and strength * max_signal >= 1:
        raise ValueError(
            f"strength={strength} with max_signal={max_signal} reaches a temperature of 0: their "
            "product must be below 1."
        )
    (signal,) = as_floats(jax.lax.stop_gradient(signal))
    if max_signal is not None:
        signal = jnp.clip(signal, -max_signal, max_signal)
    return base * (1 + strength * signal)


def asymmetric_clip_bounds(
    signal: Float[ArrayLike, "*shape"],
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.28,
    strength: Number = 1.0,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """HAPO's bounds on the ratio: room to rise where undecided, room to fall where decided.

        signal > 0:   clip_low,                          clip_high (1 + strength signal)
        signal <= 0:  clip_low (1 - strength signal),    clip_high

    The defaults are those of the paper; the released scripts set `clip_high` to 0.2.

    Args:
      signal: of `entropy_signal`.
      clip_low: how far the ratio may fall below one at a signal of 0 or more.
      clip_high: how far it may rise above one at a signal of 0 or less.
      strength: 0 leaves both bounds as they are; with 1 each may double.

    Returns:
      `(clip_low, clip_high)`, one each per token, without a gradient: as `ppo_surrogate` takes
      them.

    Raises:
      ValueError: if a bound or `strength` is negative.

    References:
      As for `entropy_statistics`; asymmetric adaptive clipping.

    >>> import jax.numpy as jnp
    >>> low, high = asymmetric_clip_bounds(jnp.array([-1.0, 0.0, 1.0]), clip_high=0.25)
    >>> low.tolist(), high.tolist()
    ([0.4000000059604645, 0.20000000298023224, 0.20000000298023224], [0.25, 0.25, 0.5])
    """
    check_distance("clip_low", clip_low)
    check_distance("clip_high", clip_high)
    _check_strength("strength", strength)
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
    """HAPO's advantages: amplified where undecided and moving, damped where decided and still.

    With ``r = exp(logprobs - old_logprobs)`` and a zone from ``1 - clip_low / 2`` to
    ``1 + clip_high / 2``,

        A (1 + strength signal)    where signal > 0 and r lies outside the zone,
                                   or signal <= 0 and r lies inside it
        A                          elsewhere, and on the edges of the zone

    Args:
      logprobs: of the sampled tokens under the current policy, in nats; no gradient.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      signal: of `entropy_signal`; no gradient.
      clip_low: of the zone. `hapo_loss` gives the adapted bounds of `asymmetric_clip_bounds`, as
        the released code does.
      clip_high: likewise.
      strength: from 0, which changes nothing, to 1, at which the most decided token has an
        advantage of 0. Beyond that, signs would flip.

    Returns:
      One advantage per token, without a gradient; 0 where the mask is false.

    Raises:
      ValueError: if a bound is negative or `strength` is not in [0, 1].

    References:
      As for `entropy_statistics`; differential advantage redistribution.

    >>> import jax.numpy as jnp
    >>> ratio, signal = jnp.array([1.0, 0.7, 1.3, 1.0]), jnp.array([-0.5, -0.5, 0.5, 0.5])
    >>> ones = jnp.ones(4)
    >>> redistributed_advantages(jnp.log(ratio), 0 * ones, ones, ones, signal).tolist()
    [0.5, 1.0, 1.5, 1.0]
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    signal = _clean_signal(tokens, signal)
    low, high = (
        distance(name, bound, tokens)
        for name, bound in (("clip_low", clip_low), ("clip_high", clip_high))
    )
    return _redistribute(tokens, signal, low, high, strength)


def hapo_surrogate(
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
) -> Float[Array, "*batch time"]:
    """Per-token loss of HAPO, to be minimised: that of PPO with bounds and advantages of its own.

    In the order of the released code: `asymmetric_clip_bounds` from the signal, then
    `redistributed_advantages` with the zone of those bounds, then `ppo_surrogate` with both. No
    gradient passes through the ratio of the redistribution. With ``clip_strength=0`` and
    ``redistribution=0`` it is `ppo_surrogate` exactly.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient. HAPO's are
        normalised over the tokens of a group.
      mask: true on sampled tokens.
      signal: of `entropy_signal`, from the current policy's entropy and the statistics of the whole
        batch; no gradient.
      clip_low: how far the ratio may fall below one, before it is adapted.
      clip_high: how far it may rise above one, before it is adapted: 0.28 in the paper, 0.2 in the
        released scripts.
      clip_strength: of `asymmetric_clip_bounds`; 0 is off.
      redistribution: the strength of `redistributed_advantages`; 0 is off.
      clip_dual: the ratio beyond which a negative advantage stops acting; None is off.
      max_log_ratio: as in `ppo_surrogate`; None is off.

    Returns:
      One loss per token, 0 where the mask is false. Reduce it with `aggregate`.

    Raises:
      ValueError: if a bound or strength is out of its range, or shapes do not agree.

    References:
      "Heterogeneous adaptive policy optimization", 2025. https://arxiv.org/abs/2509.16591
      https://github.com/starriver030515/HAPO

    >>> import jax.numpy as jnp
    >>> ratio, signal = jnp.array([1.0, 1.5, 1.5]), jnp.array([-0.5, 0.0, 1.0])
    >>> ones = jnp.ones(3)
    >>> hapo_surrogate(jnp.log(ratio), 0 * ones, ones, ones, signal, clip_high=0.25).tolist()
    [-0.5, -1.25, -3.0]
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    surrogate, _ = _hapo(
        tokens,
        _clean_signal(tokens, signal),
        clip_low,
        clip_high,
        clip_strength,
        redistribution,
        clip_dual,
        max_log_ratio,
    )
    return surrogate


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
    aggregation: Aggregation = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Float[Array, ""], dict[str, Mean]]:
    """Policy loss of HAPO: `hapo_surrogate`, weighted if asked, then `aggregate`.

    Args:
      logprobs: of the sampled tokens under the current policy, in nats.
      old_logprobs: the same under the policy that the ratio is taken against; no gradient.
      advantages: one per token, or ``[batch, 1]`` for one per row; no gradient.
      mask: true on sampled tokens.
      signal: of `entropy_signal`; no gradient.
      clip_low: see `hapo_surrogate`, as are the settings up to `max_log_ratio`.
      clip_high: 0.28 in the paper, 0.2 in the released scripts.
      clip_strength: 0 is off.
      redistribution: 0 is off.
      clip_dual: None is off.
      max_log_ratio: None is off.
      importance_weights: factors on the tokens' losses, of the shapes of `advantages`; no gradient.
        None is off.
      aggregation: how to weigh tokens and sequences, see `aggregate`.
      denominators: those of `aggregate`: `num_tokens`, `num_sequences`, `max_length`,
        `sequence_lengths`, `empty_rows`.

    Returns:
      `(loss, metrics)`. The metrics are those of `ppo_loss`, and ``redistributed``: where an
      advantage was amplified or damped.

    Raises:
      ValueError: if a bound, a strength or the aggregation is not valid, or shapes do not agree.

    References:
      As for `hapo_surrogate`.

    >>> import jax.numpy as jnp
    >>> ratio, signal = jnp.array([1.0, 1.5, 1.5]), jnp.array([-0.5, 0.0, 1.0])
    >>> ones = jnp.ones(3)
    >>> loss, metrics = hapo_loss(jnp.log(ratio), 0 * ones, ones, ones, signal, clip_high=0.25)
    >>> round(float(loss), 4), round(float(metrics["redistributed"].value()), 4)
    (-1.5833, 0.6667)
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    surrogate, statistics = _hapo(
        tokens,
        _clean_signal(tokens, signal),
        clip_low,
        clip_high,
        clip_strength,
        redistribution,
        clip_dual,
        max_log_ratio,
    )
    return reduce_surrogate(
        surrogate, statistics, tokens.mask, aggregation, importance_weights, **denominators
    )


def _hapo(
    tokens: Tokens,
    signal: Float[Array, "*batch time"],
    clip_low: Number,
    clip_high: Number,
    clip_strength: Number,
    redistribution: Number,
    clip_dual: Number | None,
    max_log_ratio: Number | None,
) -> tuple[Float[Array, "*batch time"], dict[str, Float[Array, "*batch time"]]]:
    """The surrogate of `hapo_surrogate`, and the statistics of `hapo_loss` for each token."""
    _check_strength("clip_strength", clip_strength)
    low, high = asymmetric_clip_bounds(
        signal, clip_low=clip_low, clip_high=clip_high, strength=clip_strength
    )
    advantages = _redistribute(tokens, signal, low, high, redistribution, "redistribution")
    changed = advantages != tokens.advantages
    surrogate, statistics = clipped(
        tokens._replace(advantages=advantages), low, high, clip_dual, max_log_ratio
    )
    return surrogate, {**statistics, "redistributed": changed.astype(surrogate.dtype)}


def _redistribute(
    tokens: Tokens,
    signal: Float[Array, "*batch time"],
    low: Float[Array, "..."] | Number,
    high: Float[Array, "..."] | Number,
    strength: Number,
    name: str = "strength",
) -> Float[Array, "*batch time"]:
    """The advantages of `redistributed_advantages`."""
    if not 0 <= strength <= 1:
        raise ValueError(f"{name}={strength} must be from 0, which is off, to 1.")
    ratio = jnp.exp(jax.lax.stop_gradient(tokens.logprobs) - tokens.old_logprobs)
    bottom, top = 1 - low / 2, 1 + high / 2
    unmoved = (ratio >= bottom) & (ratio <= top)
    moved = (ratio <= bottom) | (ratio >= top)
    # What stays is named, not what changes, so that a signal which is no number reaches the result.
    stays = ((signal > 0) & unmoved) | ((signal <= 0) & moved)
    return tokens.advantages * jnp.where(stays, jnp.ones_like(signal), 1 + strength * signal)


def _clean_signal(
    tokens: Tokens, signal: Float[ArrayLike, "*batch time"]
) -> Float[Array, "*batch time"]:
    """The signal in the precision of the tokens, 0 under the mask, without a gradient."""
    check_shapes(logprobs=tokens.logprobs, signal=signal)
    signal = jax.lax.stop_gradient(jnp.asarray(signal)).astype(tokens.logprobs.dtype)
    return keep(signal, tokens.mask)


def _log_entropy(
    entropy: Float[ArrayLike, "*batch time"], mask: Shaped[ArrayLike, "*batch time"]
) -> tuple[Float[Array, "*batch time"], Bool[Array, "*batch time"]]:
    """The logarithm of the entropy, floored, and 0 under the mask."""
    check_shapes(entropy=entropy, mask=mask)
    mask = as_mask(mask)
    (entropy,) = as_floats(jax.lax.stop_gradient(entropy))
    floored = jnp.maximum(keep(entropy, mask), jnp.asarray(ENTROPY_FLOOR, entropy.dtype))
    return keep(jnp.log(floored), mask), mask


def _standardize(
    log_entropy: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
    pivot: Float[Array, ""],
    scale: Float[Array, ""],
) -> Float[Array, "*batch time"]:
    """The distance from the pivot in scales; 0 where there is no scale."""
    centred = keep(log_entropy - pivot, mask)
    return jnp.where(scale == 0, jnp.zeros_like(centred), divide(centred, scale))


def _check_strength(name: str, strength: Number) -> None:
    if strength < 0:
        raise ValueError(f"{name}={strength} cannot be negative; 0 is off.")
