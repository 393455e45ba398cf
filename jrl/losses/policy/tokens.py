"""Shared parts of the policy losses: prepared arrays, ratio, reduction, order statistics.

A share of the tokens, such as ``0.2 N``, is counted exactly: in floating point 0.2 * 15 may fall
below 3, and one token more or less would be chosen on some machines.
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

# How far a ratio may go: the same for all tokens, or an array with as many axes as the tokens have.
Bound: TypeAlias = Number | Float[ArrayLike, "..."]
# One number, or with ``aggregation=None`` one per token.
Loss: TypeAlias = Float[Array, ""] | Float[Array, "*batch time"]
# What becomes metrics, by their names.
Statistics: TypeAlias = dict[str, PerToken]

# How the ratio is taken, and whose gradient the ratio of a whole row has.
RatioLevel = Literal["token", "sequence"]
SequenceGradient = Literal["token", "sequence"]

# Up to this one, the remainders below are exact in int32 whatever the number of tokens.
LARGEST_DENOMINATOR = 40_000


class Tokens(NamedTuple):
    """The four arrays of a policy loss in one precision, 0 under the mask, constants stopped."""

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
    """Check the shapes, raise the precision, hide what the mask hides, stop the gradients."""
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
    """``logprobs - old_logprobs`` within plus or minus `max_log_ratio` nats, and its statistics.

    Where the clamp acts the gradient is 0. ``ppo_kl`` is the k1 estimate of KL(old || current).
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
    """Tokens whose log-ratio is the mean of their row's, and where one was clamped before the mean.

    With `gradient` "sequence" it is the mean in the gradient, too; with "token" each token has the
    gradient of its own log-ratio.
    """
    log_ratio, statistics = clamped_log_ratio(tokens, max_log_ratio)
    mean = row_mean(log_ratio, tokens.mask)
    if gradient == "token":
        # Zero in value: only the gradient is each token's own.
        mean = jax.lax.stop_gradient(mean) + (log_ratio - jax.lax.stop_gradient(log_ratio))
    rows = tokens._replace(
        logprobs=jnp.where(tokens.mask, mean, 0), old_logprobs=jnp.zeros_like(log_ratio)
    )
    return rows, statistics["ratio_clamped"]


def log_ratio_at(
    level: RatioLevel, tokens: Tokens, max_log_ratio: Number | None
) -> tuple[PerToken, Statistics]:
    """`clamped_log_ratio` of the tokens, or of the rows that they belong to."""
    settings.choice("level", level, RatioLevel)
    if level == "token":
        return clamped_log_ratio(tokens, max_log_ratio)
    rows, ratio_clamped = average_over_rows(tokens, max_log_ratio, "sequence")
    log_ratio, statistics = clamped_log_ratio(rows, None)
    return log_ratio, {**statistics, "ratio_clamped": ratio_clamped}


def distance(name: str, bound: Bound, tokens: Tokens) -> settings.Checked:
    """The bound itself if it is a number, or one for each token. A negative one is an error."""
    if not settings.is_array(bound) or jnp.ndim(bound) == 0:
        return settings.distance(name, bound)
    bounds = zero_masked(broadcast(name, bound, tokens.logprobs), tokens.mask)
    if not isinstance(bounds, Tracer) and jnp.any(bounds < 0):
        settings.distance(name, jnp.min(bounds))
    return bounds


def floored_logprobs(tokens: Tokens, max_log_ratio: Number | None) -> PerToken:
    """The log-probabilities, no more than `max_log_ratio` nats below the old ones.

    A token that has become impossible would make ``A logp`` infinite. Where the floor acts the
    gradient is 0.
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
    """Weigh the surrogate if asked, aggregate it unless that is None, and make the metrics.

    Whatever the aggregation, the metrics are means of the statistics over the true tokens. A
    denominator where nothing is aggregated is an error.
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
    """``fraction * total`` as a whole number, a remainder and the denominator of the remainder.

    The fraction, from 0 to 1, is read as the nearest ratio whose denominator is at most 40 000:
    0.2 is 1/5 and 2e-4 is 1/5000.
    """
    exact = Fraction(fraction).limit_denominator(LARGEST_DENOMINATOR)
    numerator, denominator = exact.numerator, exact.denominator
    # total = wholes * denominator + rest, so that no product leaves int32.
    wholes, rest = total // denominator, total % denominator
    product = rest * numerator
    return wholes * numerator + product // denominator, product % denominator, denominator


def ascending(x: PerToken, mask: TokenMask) -> Float[Array, "tokens"]:
    """All true `x` in increasing order, then infinity for the others."""
    return jnp.sort(jnp.where(mask, x, jnp.asarray(jnp.inf, x.dtype)).ravel())


def kth(ordered: Float[Array, "tokens"], index: Int[Array, ""]) -> Float[Array, ""]:
    """The element of `ordered` at `index`; 0 if the index is negative, as of an empty order."""
    if not ordered.size:
        return jnp.zeros((), ordered.dtype)
    return jnp.where(index < 0, 0, ordered[jnp.maximum(index, 0)])


def top_k_mask(k: Int[Array, ""], among: TokenMask, *keys: Array) -> TokenMask:
    """True on the `k` tokens of `among` that come first when ordered by increasing keys.

    The first key decides; ties go to the next one, and at last to the earlier token.
    """
    flat = among.ravel()
    order = jnp.lexsort((*(key.ravel() for key in reversed(keys)), ~flat))
    chosen = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=jnp.int32) < k)
    return (chosen & flat).reshape(among.shape)


def random_bits(key: Array, mask: TokenMask) -> Array:
    """Random integers for the true tokens that depend on the key and on a token's rank alone.

    The rank is counted over true tokens, so padding and holes change no number.
    """
    rank = jnp.cumsum(mask.ravel(), dtype=jnp.int32) - 1
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i)))(rank)
    return bits.reshape(mask.shape)
