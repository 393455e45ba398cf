"""Diagnostics of GAE's lambda: reach of the terminal reward, sensitivity of the advantages."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Real, Shaped

from jrl.losses import settings
from jrl.losses.advantages import gae
from jrl.losses.advantages.critic import check_adaptive_lambda
from jrl.losses.arrays import (
    Number,
    PerToken,
    Scalar,
    TokenMask,
    as_floats,
    broadcast,
    masked_constants,
    num_true,
    ratio_or_zero,
    row_mean,
    zero_masked,
)
from jrl.losses.diagnostics import tokens

__all__ = [  # noqa: RUF022 - in reading order
    "terminal_reach",
    "TerminalReach",
    "lambda_sensitivity",
    "LambdaSensitivity",
    "guard_rate",
]


class TerminalReach(NamedTuple):
    """Reach of the terminal reward along responses.

    Attributes:
      share: fraction of the tokens in whose advantage the terminal error has a weight above the
        threshold.
      tokens: mean number of such tokens per response.
      horizon: mean over responses of ``1 / (1 - gamma lam)``, the effective horizon in tokens;
        infinite if ``gamma lam = 1``.
      relative_horizon: mean over responses of that horizon over the length, at most 1 each.
    """

    share: Float[Array, ""]
    tokens: Float[Array, ""]
    horizon: Float[Array, ""]
    relative_horizon: Float[Array, ""]


class LambdaSensitivity(NamedTuple):
    """Agreement of advantages at lam with those at 1, per bucket of response length.

    Attributes:
      correlation: of the two over the tokens of the bucket; 0 if one of them is constant.
      sign_agreement: share of tokens on which their signs are equal.
      tokens: number of tokens in the bucket.
    """

    correlation: Float[Array, "buckets"]
    sign_agreement: Float[Array, "buckets"]
    tokens: Int[Array, "buckets"]


def last_weight(mask: TokenMask, decay: PerToken) -> PerToken:
    """Weight of the last temporal-difference error in the advantage of each token.

    The product of `decay` from the token to the one before the last; 1 on the last token, 0 outside
    the mask.
    """
    decay = jnp.where(mask & ~tokens.last(mask), decay, 1)
    return zero_masked(jax.lax.cumprod(decay, axis=decay.ndim - 1, reverse=True), mask)


def terminal_reach(
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    lam: Scalar | Float[ArrayLike, "*#batch #time"],
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    threshold: Number = 0.01,
) -> TerminalReach:
    """Share of tokens whose advantage contains the terminal reward, not only the critic's values.

    The last temporal-difference error, which contains the reward, has a weight of
    ``(gamma lam)^(T-1-t)`` in the advantage of token t.

    **Concern**: whether an adaptive lambda is right (arXiv 2505.17997), and credit for early steps
    under a sparse reward (arXiv 2506.03038): advantages out of reach contain differences of values
    alone.

    **Reading it.** With lam 0.95 only the last 90 tokens are reached, whatever the length: long
    responses have a small share. VAPO's length-adaptive lambda makes the share constant, about
    ``4.6 alpha``. A small share is harmless with a good critic and harmful with a bad one, so
    compare with `by_position`.

    Args:
      mask: true on sampled tokens.
      lam: of the advantages; a scalar, or an array that broadcasts, such as ``lam[:, None]``.
      gamma: discount of the advantages, of the same shapes.
      threshold: weight of the terminal error above which a token is reached.

    Returns:
      A `TerminalReach`.

    References:
      Yue et al., "VAPO", 2025, section 4.2. https://arxiv.org/abs/2504.05118

    Examples:
      >>> found = terminal_reach(jnp.ones((1, 10)), lam=0.5)
      >>> share, relative_horizon = float(found.share), float(found.relative_horizon)
      >>> round(share, 3), float(found.horizon), round(relative_horizon, 3)
      (0.7, 2.0, 0.2)
    """
    lam, gamma = settings.discount("lam", lam), settings.discount("gamma", gamma)
    like = jnp.zeros(jnp.shape(mask), jnp.result_type(lam, float))
    mask, (like,) = masked_constants(mask, like=like)
    decay = broadcast("lam", lam, like) * broadcast("gamma", gamma, like)
    decay = jax.lax.stop_gradient(decay)
    threshold = settings.distance("threshold", threshold)
    reached = last_weight(mask, decay) > threshold
    rows, length = jnp.any(mask, axis=-1), num_true(mask, -1).astype(decay.dtype)
    # A row's horizon from the mean of its decays, which usually are all equal.
    lost = 1 - row_mean(decay, mask)[..., 0]
    endless = lost <= 0
    horizon = jnp.where(endless, jnp.inf, 1 / jnp.where(endless, 1, lost))
    return TerminalReach(
        share=tokens.mean(reached.astype(decay.dtype), mask),
        tokens=tokens.mean(num_true(reached, -1).astype(decay.dtype), rows),
        horizon=tokens.mean(horizon, rows),
        relative_horizon=tokens.mean(jnp.minimum(horizon / jnp.maximum(length, 1), 1), rows),
    )


def lambda_sensitivity(
    rewards: Float[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    lam: Scalar | Float[ArrayLike, "*#batch #time"],
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    edges: Sequence[int] = (),
) -> LambdaSensitivity:
    """Correlation and sign agreement of advantages at lam with unbiased ones, by response length.

    Compares ``A(lam)`` with ``A(1) = G - V``, which is unbiased for any critic and has the full
    variance of the return.

    **Concern**: whether length-dependent lambda is the right adaptation (arXiv 2505.17997).

    **Reading it.** Correlation and agreement near 1: lambda hardly matters, the critic fits the
    outcomes. Agreement near 1/2: the signs of the two are unrelated, so lambda decides what is
    learned, and one of them is wrong: the critic's, if `by_position` shows a bad one. A
    decrease over the buckets means that lambda should rise with length faster than it does.

    Args:
      rewards: one per token; usually 0 except on the last sampled one.
      values: the critic's estimates.
      mask: true on sampled tokens.
      lam: of the policy's advantages; a scalar, or an array that broadcasts, such as
        ``lam[:, None]``.
      gamma: the discount, of the same shapes.
      edges: lengths that separate the buckets, as in `length_share`; an empty tuple is one bucket.

    Returns:
      A `LambdaSensitivity`, one entry more than `edges`.

    Raises:
      ValueError: if the edges do not increase.

    References:
      Yue et al., "VAPO", 2025, section 4.2. https://arxiv.org/abs/2504.05118

    Examples:
      >>> rewards, values = jnp.array([[0.0, 1.0], [0.0, -1.0]]), jnp.zeros((2, 2))
      >>> lambda_sensitivity(rewards, values, jnp.ones((2, 2)), lam=0.5).sign_agreement.tolist()
      [1.0]
    """
    mask, (rewards, values) = masked_constants(mask, rewards=rewards, values=values)
    ours, _ = gae(rewards, values, mask, gamma=gamma, lam=lam)
    unbiased, _ = gae(rewards, values, mask, gamma=gamma, lam=1.0)
    num_buckets = len(edges) + 1
    bins = tokens.buckets(num_true(mask, -1), edges)[..., None]
    bins = jnp.broadcast_to(bins, mask.shape)
    count = tokens.counts(bins, mask, num_buckets)

    def mean_of(x: PerToken) -> Float[Array, "buckets"]:
        return ratio_or_zero(tokens.per_bin(x, bins, mask, num_buckets), count)

    x, y = ours - mean_of(ours)[bins], unbiased - mean_of(unbiased)[bins]
    spread_of_both = jnp.sqrt(mean_of(x**2) * mean_of(y**2))
    agree = (jnp.sign(ours) == jnp.sign(unbiased)).astype(ours.dtype)
    agree = jnp.where(jnp.isnan(ours + unbiased), jnp.nan, agree)
    correlation = ratio_or_zero(mean_of(x * y), spread_of_both)
    return LambdaSensitivity(correlation, mean_of(agree), count)


def guard_rate(
    lengths: Real[ArrayLike, "*batch"], *, alpha: Number, floor: Number = 0.0
) -> Float[Array, ""]:
    """Share of responses too short for `length_adaptive_lambda`: their lambda is its floor.

    ``1 - 1 / (alpha l) <= floor`` for a length l; with a floor of 0, ``alpha l <= 1``.

    **Concern**: whether length-dependent lambda is the right adaptation (arXiv 2505.17997).

    **Reading it.** 0: lambda adapts to every length. Near 1: it is constant, and with a floor of 0
    advantages are one-step TD errors, whose bias `bootstrap_bias` measures. Raise alpha: 0.05 is
    meant for thousands of tokens.

    Args:
      lengths: sampled tokens per row; rows of 0 are excluded.
      alpha: the alpha of `length_adaptive_lambda`.
      floor: the floor of `length_adaptive_lambda`.

    Returns:
      The share, in [0, 1].

    Raises:
      ValueError: if `alpha` is not positive or `floor` is not in [0, 1].

    References:
      Yue et al., "VAPO", 2025, section 4.2. https://arxiv.org/abs/2504.05118

    Examples:
      >>> float(guard_rate(jnp.array([10, 20, 40, 80]), alpha=0.05))
      0.5
    """
    alpha, floor = check_adaptive_lambda(alpha, floor)
    (lengths,) = as_floats(jax.lax.stop_gradient(lengths))
    # alpha l (1 - floor) <= 1 has no division, so integer lengths compare exactly.
    guarded = alpha * lengths * (1 - floor) <= 1
    return tokens.mean(guarded.astype(lengths.dtype), lengths > 0)
