"""HAPO's entropy signal: the policy's entropy at each token, relative to the whole batch."""

from dataclasses import dataclass
from typing import Generic, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, as_floats, masked_constants, num_true, zero_masked
from jrl.losses.policy.tokens import ascending, floor_fraction, kth
from jrl.losses.reduction import Leaf, divide

__all__ = [  # noqa: RUF022 - in reading order
    "entropy_statistics",
    "EntropyStatistics",
    "standardized_entropy",
    "entropy_signal",
    "EntropySign",
    "adaptive_temperature",
]

EntropySign = Literal["intended", "release"]

ENTROPY_FLOOR = 1e-8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EntropyStatistics(Generic[Leaf]):
    """Batch statistics of log-entropy for HAPO's signal: pivot, scale and extremes.

    Computed by `entropy_statistics` on a whole batch and passed to each of its micro-batches, so
    that they and the devices agree, or to the sampler of the next step.

    Attributes:
      pivot: the quantile of log H from which differences are taken, in log nats.
      scale: the root mean square of ``log H - pivot``.
      h_max: the largest standardised entropy of the batch.
      h_min: the smallest.
    """

    pivot: Leaf
    scale: Leaf
    h_max: Leaf
    h_min: Leaf

    @classmethod
    def neutral(cls) -> "EntropyStatistics[Array]":
        """Statistics of an empty batch, float32: the signal is 0 whatever the entropy, and the
        temperature of a sampler is its base."""
        return EntropyStatistics(*(jnp.zeros((), jnp.float32) for _ in range(4)))


def entropy_statistics(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    quantile: Number = 0.8,
) -> EntropyStatistics[Array]:
    """Pivot, scale and extremes of a batch's log-entropies, for HAPO's signal.

    With ``x = log max(H, 1e-8)`` over the N tokens in the mask, in increasing order,

        pivot = x[round(quantile (N - 1))]          the nearest order statistic, halves to even
        scale = sqrt(mean((x - pivot)^2))           around the pivot, not around the mean
        h_max, h_min = the extremes of (x - pivot) / scale

    With the default the top fifth of the tokens has a positive signal. The formulas follow the
    released code; the paper writes sigma(log H) for the scale.

    Args:
      entropy: of the policy at each token, in nats; no gradient. The **whole batch**: statistics of
        a micro-batch differ from the batch's, and do not add up.
      mask: true on sampled tokens.
      quantile: from 0 to 1; the paper's rho.

    Returns:
      The record; all 0 if no token is in the mask, and a scale and extremes of 0 if all entropies
      are equal.

    Raises:
      ValueError: if `quantile` is not in [0, 1].

    References:
      "Heterogeneous adaptive policy optimization", 2025. https://arxiv.org/abs/2509.16591

    Examples:
      >>> entropy = jnp.array([0.02, 0.05, 0.1, 0.3, 0.6, 0.9, 1.2, 2.0])
      >>> statistics = entropy_statistics(entropy, jnp.ones(8))
      >>> round(float(statistics.pivot), 4), round(float(statistics.scale), 4)
      (0.1823, 2.115)
    """
    rule = "must be from 0 to 1, such as 0.8."
    quantile = settings.static("quantile", quantile, rule, at_least=0, at_most=1)
    log_entropy, mask = _log_entropy(entropy, mask)
    tokens = num_true(mask)
    floor, rest, denominator = floor_fraction(quantile, jnp.maximum(tokens - 1, 0))
    half_up = (2 * rest > denominator) | ((2 * rest == denominator) & (floor % 2 == 1))
    index = jnp.where(tokens == 0, -1, jnp.where(half_up, floor + 1, floor))
    pivot = kth(ascending(log_entropy, mask), index)
    centred = zero_masked(log_entropy - pivot, mask)
    scale = jnp.sqrt(divide(jnp.sum(centred**2), tokens))
    standardized = _standardize(log_entropy, mask, pivot, scale)
    h_max = jnp.max(jnp.where(mask, standardized, -jnp.inf), initial=-jnp.inf)
    h_min = jnp.min(jnp.where(mask, standardized, jnp.inf), initial=jnp.inf)
    some = tokens > 0
    return EntropyStatistics(pivot, scale, zero_masked(h_max, some), zero_masked(h_min, some))


def standardized_entropy(
    entropy: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    quantile: Number = 0.8,
    statistics: EntropyStatistics[Array] | None = None,
) -> Float[Array, "*batch time"]:
    """Standardised log-entropy of each token (HAPO's h), 0 at the pivot of the batch.

        h = (log H - pivot) / scale

    Positive where the entropy is above the `quantile` of the batch. The paper's temperature uses h
    itself; everything else uses `entropy_signal`, which bounds it.

    Args:
      entropy: of the policy at each token, in nats, floored at 1e-8; no gradient.
      mask: true on sampled tokens.
      quantile: see `entropy_statistics`; ignored if `statistics` is given.
      statistics: of the whole batch, or of the step before. None computes them from these
        arrays, which must then be the **whole batch**; the released code computes them per
        micro-batch, so its loss depends on how a batch is split.

    Returns:
      One number per token; 0 where the mask is false, and everywhere if the scale is 0.

    Raises:
      ValueError: if `quantile` is not in [0, 1].

    References:
      As for `entropy_statistics`.

    Examples:
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
    """HAPO's entropy signal: the standardised entropy of each token, scaled to [-1, 1].

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
      quantile: see `entropy_statistics`; ignored if `statistics` is given.
      sign: "intended" or "release"; the latter reproduces the released code.
      statistics: as for `standardized_entropy`. With statistics of another batch, a token beyond
        its extremes has a signal beyond 1 in magnitude.

    Returns:
      One number per token (gradient stopped); 0 where the mask is false.

    Raises:
      ValueError: if `quantile` is not in [0, 1] or `sign` is unknown.

    References:
      As for `entropy_statistics`; eq. 6.

    Examples:
      >>> entropy = jnp.array([[0.25, 1.0, 1.0], [1.0, 2.0, 0.0]])
      >>> mask = jnp.array([[1, 1, 1], [1, 1, 0]])
      >>> entropy_signal(entropy, mask).tolist()
      [[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    settings.choice("sign", sign, EntropySign)
    if statistics is None:
        statistics = entropy_statistics(entropy, mask, quantile=quantile)
    h = standardized_entropy(entropy, mask, statistics=statistics)
    up, down = (
        jax.lax.stop_gradient(jnp.asarray(x, h.dtype)) for x in (statistics.h_max, statistics.h_min)
    )
    down = jnp.abs(down) if sign == "intended" else down
    extreme = jnp.where(h > 0, up, down)
    return h / jnp.where(extreme == 0, 1, extreme)


def adaptive_temperature(
    signal: Float[ArrayLike, "*shape"],
    *,
    base: Number = 1.0,
    strength: Number = 0.05,
    max_signal: Number | None = 1.0,
) -> Float[Array, "*shape"]:
    """HAPO's adaptive sampling temperature: higher where the policy's entropy is high.

        T = base (1 + strength clip(signal, -max_signal, max_signal))

    The defaults are the released code's, whose signal is `entropy_signal` with the
    statistics of the training step before (the first step samples at `base`). For the paper's
    ``T = base (1 + 0.1 h)`` pass `standardized_entropy`, ``strength=0.1`` and ``max_signal=None``.

    Tokens sampled at T are mildly off-policy for a trainer that computes log-probabilities at
    another temperature: record the sampler's, at T, and correct for the difference.

    Args:
      signal: from `entropy_signal`, of the distribution that the next token is sampled from.
      base: temperature at a signal of 0, above 0.
      strength: relative increase of the temperature at a signal of 1; 0 gives a constant
        temperature.
      max_signal: the signal is clipped to plus or minus this; None disables the clip, and T is then
        0 or below where the signal is ``-1 / strength`` or less.

    Returns:
      One temperature per signal (gradient stopped).

    Raises:
      ValueError: if `base` is not positive, `strength` is negative, or `strength` and `max_signal`
        together allow a temperature of 0.

    References:
      As for `entropy_statistics`; adaptive temperature sampling.

    Examples:
      >>> adaptive_temperature(jnp.array([-1.0, 0.0, 2.0]), strength=0.25).tolist()
      [0.75, 1.0, 1.25]
    """
    rule = "is a temperature and must be above 0, such as 1."
    base = settings.number("base", base, rule, above=0)
    strength = check_strength("strength", strength)
    max_signal = settings.optional_distance("max_signal", max_signal)
    (signal,) = as_floats(jax.lax.stop_gradient(signal))
    if max_signal is not None:
        product = strength * max_signal
        if not isinstance(product, Array) and product >= 1:
            raise ValueError(
                f"strength={strength} with max_signal={max_signal} reaches a temperature of 0: "
                "their product must be below 1."
            )
        signal = jnp.clip(signal, -max_signal, max_signal)
    return base * (1 + strength * signal)


def check_strength(name: str, strength: Number) -> settings.Checked:
    return settings.number(name, strength, "cannot be negative; 0 is off.", at_least=0)


def _log_entropy(
    entropy: Float[ArrayLike, "*batch time"], mask: Shaped[ArrayLike, "*batch time"]
) -> tuple[Float[Array, "*batch time"], Bool[Array, "*batch time"]]:
    """Logarithm of the floored entropy, 0 outside the mask, and the mask."""
    mask, (entropy,) = masked_constants(mask, entropy=entropy)
    floored = jnp.maximum(entropy, jnp.asarray(ENTROPY_FLOOR, entropy.dtype))
    return zero_masked(jnp.log(floored), mask), mask


def _standardize(
    log_entropy: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
    pivot: Float[Array, ""],
    scale: Float[Array, ""],
) -> Float[Array, "*batch time"]:
    """Distance from the pivot in units of the scale; 0 where the scale is 0."""
    centred = zero_masked(log_entropy - pivot, mask)
    return jnp.where(scale == 0, 0, divide(centred, scale))
