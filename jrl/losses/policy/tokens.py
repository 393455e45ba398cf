"""Shared functions of the policy losses: input preparation, ratio, reduction, order statistics.

A fraction of the tokens, such as ``0.2 N``, is computed in exact arithmetic. In floating point
0.2 * 15 may round to below 3, and the number of selected tokens would depend on the machine.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Shaped

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    PerToken,
    TokenMask,
    as_floats,
    as_mask,
    broadcast,
    check_shapes,
    clip,
    row_mean,
    zero_masked,
)
from jrl.losses.reduction import Aggregation, Denominators, Mean, aggregate, check_denominators

# Clip bound: one number, or an array with as many axes as the tokens.
Bound: TypeAlias = Number | Float[ArrayLike, "..."]
# A scalar, or with ``aggregation=None`` one loss per token.
Loss: TypeAlias = Float[Array, ""] | Float[Array, "*batch time"]
# Per-token statistics, by the name of the metric that is their mean.
Statistics: TypeAlias = dict[str, PerToken]

# Level of the ratio, a token's or a row's, and gradient of a row's ratio.
RatioLevel = Literal["token", "sequence"]
SequenceGradient = Literal["token", "sequence"]

# Up to this denominator, `floor_fraction` is exact in int32 for any number of tokens.
LARGEST_DENOMINATOR = 40_000


class Tokens(NamedTuple):
    """Arrays of a policy loss: one precision, 0 outside the mask, a gradient of `logprobs` only."""

    logprobs: PerToken
    old_logprobs: PerToken
    advantages: PerToken
    mask: TokenMask


def prepare(
    logprobs: Float[ArrayLike, "*batch time"],
    old_logprobs: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> Tokens:
    """Checks shapes, casts to one precision, zeroes tokens outside the mask, stops gradients."""
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    mask = as_mask(mask)
    logprobs, old_logprobs, advantages = as_floats(logprobs, old_logprobs, advantages)
    advantages = broadcast("advantages", advantages, logprobs)
    return Tokens(
        logprobs=zero_masked(logprobs, mask),
        old_logprobs=zero_masked(jax.lax.stop_gradient(old_logprobs), mask),
        advantages=zero_masked(jax.lax.stop_gradient(advantages), mask),
        mask=mask,
    )


def clamped_log_ratio(tokens: Tokens, max_log_ratio: Number | None) -> tuple[PerToken, Statistics]:
    """Log-ratio ``logprobs - old_logprobs``, clamped to plus or minus `max_log_ratio` nats, and its
    statistics.

    The gradient of a clamped token is 0. ``ppo_kl`` is the k1 estimate of KL(old || current).
    """
    max_log_ratio = settings.optional_distance("max_log_ratio", max_log_ratio)
    log_ratio = tokens.logprobs - tokens.old_logprobs
    beyond = jnp.zeros_like(tokens.mask)
    if max_log_ratio is not None:
        beyond = jnp.abs(log_ratio) > max_log_ratio
        log_ratio = clip(log_ratio, max_log_ratio)
    ratio = jnp.exp(log_ratio)
    return log_ratio, {
        "ppo_kl": -log_ratio,
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "ratio_clamped": beyond.astype(ratio.dtype),
    }


def average_over_rows(
    tokens: Tokens, max_log_ratio: Number | None, gradient: SequenceGradient
) -> tuple[Tokens, PerToken]:
    """Tokens with the mean log-ratio of their row, and 1 for each token clamped before the mean.

    With `gradient` "sequence" it is the gradient of the mean, too; with "token" each token has
    the gradient of its own log-ratio.
    """
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    mean = row_mean(log_ratio, tokens.mask)
    if gradient == "token":
        # The added term is 0 in value; its gradient belongs to the token's own log-ratio.
        mean = jax.lax.stop_gradient(mean) + (log_ratio - jax.lax.stop_gradient(log_ratio))
    rows = tokens._replace(
        logprobs=jnp.where(tokens.mask, mean, 0), old_logprobs=jnp.zeros_like(log_ratio)
    )
    return rows, statistics["ratio_clamped"]


def log_ratio_at(
    level: RatioLevel, tokens: Tokens, max_log_ratio: Number | None
) -> tuple[PerToken, Statistics]:
    """Clamped log-ratio of each token, or the mean of its row, and its statistics."""
    settings.choice("level", level, RatioLevel)
    if level == "token":
        return clamped_log_ratio(tokens, max_log_ratio)
    rows, ratio_clamped = average_over_rows(tokens, max_log_ratio, "sequence")
    log_ratio, statistics = clamped_log_ratio(rows, None)
    return log_ratio, {**statistics, "ratio_clamped": ratio_clamped}


def distance(name: str, bound: Bound, tokens: Tokens) -> settings.Checked:
    """Checked clip bound: a number, or an array broadcast to one bound per token.

    A negative bound is an error, unless it is traced.
    """
    if not settings.is_array(bound) or jnp.ndim(bound) == 0:
        return settings.distance(name, bound)
    bounds = zero_masked(broadcast(name, bound, tokens.logprobs), tokens.mask)
    if not isinstance(bounds, Tracer) and jnp.any(bounds < 0):
        settings.distance(name, jnp.min(bounds))
    return bounds


def floored_logprobs(tokens: Tokens, max_log_ratio: Number | None) -> PerToken:
    """Log-probabilities, floored at `max_log_ratio` nats below the old ones.

    Without the floor, a token of probability 0 makes ``A logp`` infinite. The gradient of a floored
    token is 0.
    """
    max_log_ratio = settings.optional_distance("max_log_ratio", max_log_ratio)
    if max_log_ratio is None:
        return tokens.logprobs
    floor = tokens.old_logprobs - max_log_ratio
    return jnp.where(tokens.logprobs < floor, floor, tokens.logprobs)


def reduce_surrogate(
    loss_function: Callable[..., Any],
    surrogate: PerToken,
    statistics: Statistics,
    tokens: Tokens,
    aggregation: Aggregation | None,
    importance_weights: Float[ArrayLike, "*#batch #time"] | None,
    denominators: Denominators,
) -> tuple[Loss, dict[str, Mean]]:
    """Applies the importance weights, aggregates the surrogate and computes the metrics.

    Weights or an aggregation of None are skipped. Metrics are means of the statistics over the
    tokens in the mask, whatever the aggregation. Denominators need an aggregation.
    """
    check_denominators(loss_function, denominators)
    mask = tokens.mask
    if importance_weights is not None:
        weights = broadcast("importance_weights", importance_weights, surrogate)
        surrogate = surrogate * jax.lax.stop_gradient(zero_masked(weights, mask))
    loss = surrogate
    if aggregation is not None:
        loss = aggregate(surrogate, mask, aggregation, **denominators)
    elif unused := [name for name, x in denominators.items() if x is not None]:
        raise ValueError(
            f"aggregation=None gives one loss per token and divides by nothing: leave out "
            f"{', '.join(unused)}, or choose an aggregation."
        )
    return loss, {name: Mean.of(statistic, mask) for name, statistic in statistics.items()}


def floor_fraction(
    fraction: int | float, total: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""], int]:
    """Integer part of ``fraction * total``, the remainder, and the denominator of the remainder.

    The fraction, from 0 to 1, is rounded to the nearest ratio with a denominator of at most 40 000:
    0.2 is 1/5 and 2e-4 is 1/5000.
    """
    exact = Fraction(fraction).limit_denominator(LARGEST_DENOMINATOR)
    numerator, denominator = exact.numerator, exact.denominator
    # total = wholes * denominator + rest, so that no product overflows int32.
    wholes, rest = total // denominator, total % denominator
    product = rest * numerator
    return wholes * numerator + product // denominator, product % denominator, denominator


def ascending(x: PerToken, mask: TokenMask) -> Float[Array, "tokens"]:
    """Entries of `x` in the mask in increasing order, then infinity for each other entry."""
    return jnp.sort(jnp.where(mask, x, jnp.asarray(jnp.inf, x.dtype)).ravel())


def kth(ordered: Float[Array, "tokens"], index: Int[Array, ""]) -> Float[Array, ""]:
    """Element of `ordered` at `index`; 0 if the index is negative or `ordered` is empty."""
    if not ordered.size:
        return jnp.zeros((), ordered.dtype)
    return jnp.where(index < 0, 0, ordered[jnp.maximum(index, 0)])


def top_k_mask(k: Int[Array, ""], among: TokenMask, *keys: Array) -> TokenMask:
    """Mask of the `k` tokens with the smallest keys in the mask `among`.

    Ties in the first key are broken by the next one, and finally in favour of the earlier token.
    """
    flat = among.ravel()
    order = jnp.lexsort((*(key.ravel() for key in reversed(keys)), ~flat))
    chosen = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=jnp.int32) < k)
    return (chosen & flat).reshape(among.shape)


def random_bits(key: Array, mask: TokenMask) -> Array:
    """Random integer per token in the mask, a function of the key and of the token's rank.

    The rank counts tokens in the mask, so padding and holes do not change the integers.
    """
    rank = jnp.cumsum(mask.ravel(), dtype=jnp.int32) - 1
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i)))(rank)
    return bits.reshape(mask.shape)
