"""Credit assignment: diagnostics of how a critic distinguishes the steps of a response."""

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
    """The variance of advantages, split.

    Attributes:
      within: mean over responses of the variance of their tokens' advantages.
      between: variance over responses of their mean advantages.
      ratio: `within` over `between`; 0 where `between` is.
    """

    within: Float[Array, ""]
    between: Float[Array, ""]
    ratio: Float[Array, ""]


class Concentration(NamedTuple):
    """How few tokens carry the credit of a response, as means over responses.

    Attributes:
      gini: coefficient of ``|delta_t|``: 0 where all tokens carry the same, near 1 where one
        carries everything.
      top_mass: share of the sum of ``|delta_t|`` on the largest of them.
      identity_gap: the largest ``|sum_t gamma^t delta_t - (R - V_0)|`` of a response, 0 up to
        rounding.
    """

    gini: Float[Array, ""]
    top_mass: Float[Array, ""]
    identity_gap: Float[Array, ""]


def within_between_variance(
    advantages: Float[ArrayLike, "*batch time"], mask: Shaped[ArrayLike, "*batch time"]
) -> VarianceSplit:
    """Variance of advantages within responses against that between them.

    **Concern**: turning a global value signal into guidance of single steps (arXiv 2506.03038).

    **Reading it.** A ratio near 0: all tokens of a response are pushed alike, and the critic adds
    nothing to a baseline per prompt, as GRPO has it without a critic. A large ratio says that
    tokens are told apart, not that it is done rightly: a noisy critic does it too. Compare with
    `outcome_contradiction` and `td_concentration`.

    Args:
      advantages: of the tokens; whitened or not, the ratio of the two only shifts by their mean.
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
    # Equal means differ by what their sums were rounded by, a small part of their size.
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
    """How far the temporal-difference errors of a response pile up on few of its tokens.

    ``delta_t = r_t + gamma V_{t+1} - V_t`` are the steps in which the critic changes its mind, and
    they telescope: ``sum_t gamma^t delta_t = R - V_0``, with the discounted return R.

    **Concern**: credit assignment with a sparse reward (arXiv 2506.03038).

    **Reading it.** If few tokens decide a response, a critic that sees them has a high Gini
    coefficient with the mass away from the end. Mass that lies on the last token alone (a top mass
    near 1) is a critic that learns the outcome only when it is told. A Gini coefficient near 0 is
    noise spread over all tokens.

    Args:
      rewards: one per token; usually zero but for the last sampled one.
      values: the critic's estimates.
      mask: true on sampled tokens.
      gamma: the discount per token.
      share: of a response's tokens, how many count as the top, rounded up.

    Returns:
      A `Concentration`. Responses whose errors are all 0 count with a Gini coefficient and a top
      mass of 0.

    Raises:
      ValueError: unless `share` lies above 0 and up to 1.

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

    # True tokens first, the smallest error first; what the mask hides follows.
    ordered = jnp.sort(jnp.where(mask, jnp.abs(errors), jnp.inf), axis=-1)
    rank = jnp.broadcast_to(jnp.arange(1, mask.shape[-1] + 1, dtype=jnp.int32), mask.shape)
    true = rank <= length
    ordered = zero_masked(ordered, true)
    count = jnp.maximum(length, 1).astype(errors.dtype)
    total = jnp.sum(ordered, axis=-1, keepdims=True)
    weighted = jnp.sum(ordered * rank.astype(errors.dtype), axis=-1, keepdims=True)
    gini = 2 * ratio_or_zero(weighted, count * total) - (count + 1) / count
    # A little less before rounding up: 5 % of 20 tokens is one, whatever 0.05 is in binary.
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
    """The share of tokens whose advantage has another sign than the outcome's surprise.

    The surprise of a response is ``R - V_0``: what it got, less what its prompt promised. 0 has a
    sign of its own.

    **Concern**: turning a global value signal into guidance of single steps (arXiv 2506.03038).

    **Reading it.** 0: the sign of every token is that of its response, as without a critic. Some
    contradiction is the point of a critic: a wrong step in a right answer. About 1/2 means that
    tokens are pushed without regard to the outcome, which `by_position` must justify.

    Args:
      rewards: one per token; R is their discounted sum over the response.
      values: the critic's estimates; V_0 is that of the first true token.
      advantages: of the tokens, not centred by whitening, which moves signs.
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
    """``sum_t gamma^t x_t`` over the true tokens of each row."""
    weights = jnp.asarray(gamma, x.dtype) ** tokens.index(mask).astype(x.dtype)
    return jnp.sum(zero_masked(x * weights, mask), axis=-1)


def _surprise(rewards: PerToken, values: PerToken, mask: TokenMask, gamma: Scalar) -> PerRow:
    """``R - V_0`` of each row."""
    gamma = settings.discount("gamma", gamma)
    first = mask & (tokens.index(mask) == 0)
    return _discounted_sum(rewards, mask, gamma) - jnp.sum(zero_masked(values, first), axis=-1)
