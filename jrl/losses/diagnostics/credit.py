"""Credit assignment: diagnostics of advantages and TD errors within responses."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.advantages import gae
from jrl.losses.arrays import (
    Number,
    PerRow,
    PerToken,
    Scalar,
    TokenMask,
    masked_constants,
    num_true,
    ratio_or_zero,
    row_mean,
    zero_masked,
)
from jrl.losses.diagnostics import tokens

__all__ = [  # noqa: RUF022 - in reading order
    "within_between_variance",
    "VarianceSplit",
    "td_concentration",
    "Concentration",
    "outcome_contradiction",
]


class VarianceSplit(NamedTuple):
    """Variance of advantages, within and between responses.

    Attributes:
      within: mean over responses of the variance of their tokens' advantages.
      between: variance over responses of their mean advantages.
      ratio: `within` over `between`; 0 if `between` is 0.
    """

    within: Float[Array, ""]
    between: Float[Array, ""]
    ratio: Float[Array, ""]


class Concentration(NamedTuple):
    """Concentration of a response's temporal-difference errors ``delta_t`` on few tokens.

    Attributes:
      gini: Gini coefficient of ``|delta_t|``, the mean over responses: 0 if all tokens have the
        same, near 1 if one token has all.
      top_mass: fraction of the sum of ``|delta_t|`` on the top `share` of the tokens, the mean over
        responses.
      identity_gap: the largest ``|sum_t gamma^t delta_t - (R - V_0)|`` of any response, 0 up to
        rounding.
    """

    gini: Float[Array, ""]
    top_mass: Float[Array, ""]
    identity_gap: Float[Array, ""]


def within_between_variance(
    advantages: Float[ArrayLike, "*batch time"], mask: Shaped[ArrayLike, "*batch time"]
) -> VarianceSplit:
    """Variance of advantages within responses and between them.

    **Concern**: turning a global value signal into guidance of single steps (arXiv 2506.03038).

    **Reading it.** A ratio near 0: all tokens of a response have nearly the same advantage, and the
    critic adds nothing to a baseline per prompt, which GRPO has, too. A large ratio
    means that advantages differ between tokens, not that the differences are right: a noisy critic
    has a large ratio, too. Compare with `outcome_contradiction` and `td_concentration`.

    Args:
      advantages: of the tokens; whitening does not change the ratio.
      mask: true on sampled tokens.

    Returns:
      A `VarianceSplit`, with population variances.

    Examples:
      >>> advantages = jnp.array([[1.0, 3.0], [-3.0, -1.0]])
      >>> [float(x) for x in within_between_variance(advantages, jnp.ones((2, 2)))]
      [1.0, 4.0, 0.25]
    """
    mask, (advantages,) = masked_constants(mask, advantages=advantages)
    rows, means = jnp.any(mask, axis=-1), row_mean(advantages, mask)[..., 0]
    within = tokens.mean(row_mean((advantages - means[..., None]) ** 2, mask)[..., 0], rows)
    between = tokens.mean((means - tokens.mean(means, rows)) ** 2, rows)
    # Equal means differ by rounding errors, small relative to the means.
    rounding = 64 * jnp.finfo(between.dtype).eps
    flat = between <= rounding**2 * tokens.mean(means**2, rows)
    return VarianceSplit(within, between, ratio_or_zero(within, jnp.where(flat, 0, between)))


def td_concentration(
    rewards: Float[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar = 1.0,
    share: Number = 0.05,
) -> Concentration:
    """Concentration of a response's temporal-difference errors on few of its tokens.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` are the changes of the critic's estimate from token to
    token. They telescope: ``sum_t gamma^t delta_t = R - V_0``, with the discounted return R.

    **Concern**: credit assignment with a sparse reward (arXiv 2506.03038).

    **Reading it.** If few tokens decide a response, a critic that detects them has a high Gini
    coefficient with the mass away from the end. Mass on the last token alone (a top mass near 1)
    means that the critic does not predict the outcome before the reward. A Gini coefficient near 0
    is noise spread over all tokens.

    Args:
      rewards: one per token; usually 0 except on the last sampled one.
      values: the critic's estimates.
      mask: true on sampled tokens.
      gamma: the discount per token.
      share: fraction of a response's tokens in the top mass, rounded up to whole tokens.

    Returns:
      A `Concentration`. Responses whose errors are all 0 enter the means with a Gini coefficient
      and a top mass of 0.

    Raises:
      ValueError: if `share` is not in (0, 1].

    Examples:
      >>> rewards, values = jnp.array([[0.0, 0.0, 0.0, 1.0]]), jnp.array([[0.5, 0.5, 1.0, 1.0]])
      >>> [float(x) for x in td_concentration(rewards, values, jnp.ones((1, 4)))]
      [0.75, 1.0, 0.0]
    """
    rule = "must be in (0, 1]: it is a fraction of the tokens."
    share = settings.number("share", share, rule, above=0, at_most=1)
    mask, (rewards, values) = masked_constants(mask, rewards=rewards, values=values)
    errors, _ = gae(rewards, values, mask, gamma=gamma, lam=0.0)
    rows, length = jnp.any(mask, axis=-1), num_true(mask, -1)[..., None]

    # Tokens in the mask come first, in increasing order of their errors.
    ordered = jnp.sort(jnp.where(mask, jnp.abs(errors), jnp.inf), axis=-1)
    rank = jnp.broadcast_to(jnp.arange(1, mask.shape[-1] + 1, dtype=jnp.int32), mask.shape)
    true = rank <= length
    ordered = zero_masked(ordered, true)
    count = jnp.maximum(length, 1).astype(errors.dtype)
    total = jnp.sum(ordered, axis=-1, keepdims=True)
    weighted = jnp.sum(ordered * rank.astype(errors.dtype), axis=-1, keepdims=True)
    gini = 2 * ratio_or_zero(weighted, count * total) - (count + 1) / count
    # Slightly less before rounding up: 5 % of 20 tokens is 1, whatever 0.05 is in binary.
    top = jnp.ceil(share * count * (1 - 1e-6)).astype(rank.dtype)
    largest = jnp.sum(zero_masked(ordered, rank > length - top), axis=-1, keepdims=True)
    mass = ratio_or_zero(largest, total)

    gap = jnp.abs(_discounted_sum(errors, mask, gamma) - _surprise(rewards, values, mask, gamma))
    nothing = total[..., 0] == 0
    return Concentration(
        gini=tokens.mean(jnp.where(nothing, 0, gini[..., 0]), rows),
        top_mass=tokens.mean(mass[..., 0], rows),
        identity_gap=jnp.max(gap, initial=0),
    )


def outcome_contradiction(
    rewards: Float[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar = 1.0,
) -> Float[Array, ""]:
    """Share of tokens whose advantage differs in sign from ``R - V_0`` of their response.

    ``R - V_0`` is the return minus the value of the prompt. 0 is a sign of its own.

    **Concern**: turning a global value signal into guidance of single steps (arXiv 2506.03038).

    **Reading it.** 0: every advantage has the sign of its response, as in GRPO. Some
    contradiction is the purpose of a critic: a wrong step in a right answer. About 1/2 means that
    signs are independent of the outcome: justified only if `by_position` shows a good
    critic.

    Args:
      rewards: one per token; R is their discounted sum over the response.
      values: the critic's estimates; V_0 is the value of the first token in the mask.
      advantages: of the tokens, not centred by whitening, which changes signs.
      mask: true on sampled tokens.
      gamma: the discount per token.

    Returns:
      The share, in [0, 1].

    Examples:
      >>> rewards, values = jnp.array([0.0, 0.0, 0.0, 1.0]), jnp.full(4, 0.5)
      >>> advantages = jnp.array([0.5, -0.25, 0.5, 0.5])
      >>> float(outcome_contradiction(rewards, values, advantages, jnp.ones(4)))
      0.25
    """
    mask, (rewards, values, advantages) = masked_constants(
        mask, rewards=rewards, values=values, advantages=advantages
    )
    surprise = _surprise(rewards, values, mask, gamma)
    other = jnp.sign(advantages) != jnp.sign(surprise)[..., None]
    return tokens.mean(other.astype(advantages.dtype), mask)


def _discounted_sum(x: PerToken, mask: TokenMask, gamma: Scalar) -> PerRow:
    """``sum_t gamma^t x_t`` over the tokens of each row in the mask."""
    weights = jnp.asarray(gamma, x.dtype) ** tokens.index(mask).astype(x.dtype)
    return jnp.sum(zero_masked(x * weights, mask), axis=-1)


def _surprise(rewards: PerToken, values: PerToken, mask: TokenMask, gamma: Scalar) -> PerRow:
    """``R - V_0`` of each row."""
    gamma = settings.discount("gamma", gamma)
    first = mask & (tokens.index(mask) == 0)
    return _discounted_sum(rewards, mask, gamma) - jnp.sum(zero_masked(values, first), axis=-1)
