"""Diagnostics of a critic: explained variance by position, calibration, and bootstrap bias."""

from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Shaped

from jrl.losses import settings
from jrl.losses.advantages import gae
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_mask,
    broadcast,
    masked_constants,
    num_true,
    ratio_or_zero,
)
from jrl.losses.diagnostics import tokens

__all__ = [  # noqa: RUF022 - in reading order
    "by_position",
    "ByPosition",
    "relative_position",
    "calibration",
    "Calibration",
    "bootstrap_bias",
    "bootstrap_bias_bound",
    "BootstrapBias",
]


class ByPosition(NamedTuple):
    """Errors of a critic per bin of relative position, from the first tokens to the last.

    Attributes:
      explained_variance: ``1 - Var(G - V) / Var(G)`` of the tokens of the bin; 0 if the returns
        do not vary.
      bias: mean of ``V - G``.
      error: root of the mean of ``(V - G)^2``.
      tokens: number of tokens in the bin.
    """

    explained_variance: Float[Array, "bins"]
    bias: Float[Array, "bins"]
    error: Float[Array, "bins"]
    tokens: Int[Array, "bins"]


def relative_position(
    mask: Shaped[ArrayLike, "*batch time"], *, num_bins: SupportsIndex = 10
) -> Int[Array, "*batch time"]:
    """Relative position of each token in its response, as a bin ``floor(num_bins t / T)``.

    Args:
      mask: true on sampled tokens; t and T are the index and the number of these.
      num_bins: number of bins; 10 are deciles.

    Returns:
      Integers in ``0..num_bins - 1``, 0 where the mask is false.

    Raises:
      ValueError: if `num_bins` is not positive.

    Examples:
      >>> relative_position(jnp.array([1, 1, 0, 1, 1]), num_bins=2).tolist()
      [0, 0, 0, 1, 1]
    """
    num_bins = settings.integer("num_bins", num_bins, "must be at least 1.", at_least=1)
    mask = as_mask(mask)
    length = jnp.maximum(num_true(mask, -1), 1)[..., None]
    return jnp.where(mask, num_bins * tokens.index(mask) // length, 0)


def by_position(
    values: Float[ArrayLike, "*batch time"],
    returns: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    num_bins: SupportsIndex = 10,
) -> ByPosition:
    """Explained variance and bias of a critic by relative position in the response.

    **Concern**: value approximation over long horizons (arXiv 2505.17997), and the representation
    of a distant goal by one value (arXiv 2506.03038).

    **Reading it.** Near the end a critic sees the answer, and explained variance should come near
    1. If it falls towards the start faster than the task demands, the critic does not predict far
    ahead. It need not be 1 there: variance that the first tokens do not determine cannot be
    explained. A bias far from 0 in the first bins is the failure that value pretraining (VC-PPO)
    prevents; a bias of one sign in all bins is a critic that lags behind the policy.

    Args:
      values: the critic's estimates.
      returns: Monte-Carlo returns, as of `gae` with ``lam=1``. With a smaller lam they
        contain the values under test.
      mask: true on sampled tokens.
      num_bins: bins per response; 10 are deciles.

    Returns:
      A `ByPosition`.

    Raises:
      ValueError: if `num_bins` is not positive.

    References:
      Yuan et al., "VC-PPO", 2025, section 3 (value bias). https://arxiv.org/abs/2503.01491

    Examples:
      >>> values, returns = jnp.array([[0.5, 1.0], [0.5, 0.0]]), jnp.array([[1.0, 1.0], [0.0, 0.0]])
      >>> found = by_position(values, returns, jnp.ones((2, 2)), num_bins=2)
      >>> found.explained_variance.tolist(), found.error.tolist()
      ([0.0, 1.0], [0.5, 0.0])
    """
    num_bins = settings.integer("num_bins", num_bins, "must be at least 1.", at_least=1)
    bins = relative_position(mask, num_bins=num_bins)
    mask, (values, returns) = masked_constants(mask, values=values, returns=returns)
    num_tokens = tokens.counts(bins, mask, num_bins)

    def mean_of(x: Float[Array, "*batch time"]) -> Float[Array, "bins"]:
        return ratio_or_zero(tokens.per_bin(x, bins, mask, num_bins), num_tokens)

    error = values - returns
    bias, centre = mean_of(error), mean_of(returns)
    # Two passes: a variance as the difference of two large squares would lose its digits.
    unexplained = mean_of((error - bias[bins]) ** 2)
    variance = mean_of((returns - centre[bins]) ** 2)
    # Equal returns differ from their mean by a rounding error, small relative to the returns.
    rounding = 64 * jnp.finfo(variance.dtype).eps
    flat = variance <= rounding**2 * mean_of(returns**2)
    explained = 1 - unexplained / jnp.where(flat, 1, variance)
    return ByPosition(
        explained_variance=jnp.where(flat, 0, explained),
        bias=bias,
        error=jnp.sqrt(mean_of(error**2)),
        tokens=num_tokens,
    )


class Calibration(NamedTuple):
    """Calibration of predicted probabilities of success p.

    Attributes:
      brier: mean of ``(p - success)^2``. A constant 1/2 scores 0.25; 0 is perfect.
      ece: expected calibration error, the mean over tokens of ``|predicted - observed|`` of their
        bin, in [0, 1].
      predicted: ``[bins]`` mean p of each bin, 0 in empty ones.
      observed: ``[bins]`` share of successes in each bin, 0 in empty ones.
      tokens: ``[bins]`` number of tokens in each bin.
    """

    brier: Float[Array, ""]
    ece: Float[Array, ""]
    predicted: Float[Array, "bins"]
    observed: Float[Array, "bins"]
    tokens: Int[Array, "bins"]


def calibration(
    values: Float[ArrayLike, "*batch time"],
    successes: Shaped[ArrayLike, "*#batch #time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    low: Number = 0.0,
    high: Number = 1.0,
    num_bins: SupportsIndex = 10,
) -> Calibration:
    """Brier score, calibration error and reliability curve of a critic with binary outcomes.

    With a reward of `low` for failure and `high` for success and no discount, a value predicts a
    probability of success of ``p = (V - low) / (high - low)``, clipped to [0, 1].

    **Concern**: value approximation (arXiv 2505.17997): a critic that explains some variance may
    still be wrong about how likely success is, which shifts all advantages that bootstrap from it.

    **Reading it.** The curve of observed against predicted is the diagonal for a calibrated critic.
    Below it the critic overestimates success, above it the critic underestimates it. A flat curve
    is a critic that does not discriminate; its calibration error may still be small, so look at the
    Brier score as well. Tokens of one response share one outcome: compute error bars over
    responses.

    Args:
      values: the critic's estimates, in units of reward.
      successes: success of each response, bool or 0/1; ``[batch, 1]`` for one per row.
      mask: true on sampled tokens.
      low: the return of a failure.
      high: the return of a success.
      num_bins: bins of equal width in p.

    Returns:
      A `Calibration`.

    Raises:
      ValueError: if `low` is not below `high` or `num_bins` is not positive.

    References:
      Brier, "Verification of forecasts expressed in terms of probability", 1950.
      Naeini et al., "Obtaining well calibrated probabilities using Bayesian binning", 2015.

    Examples:
      >>> values, success = jnp.array([[0.75, 0.25], [0.25, 0.75]]), jnp.array([[True], [False]])
      >>> found = calibration(values, success, jnp.ones((2, 2)), num_bins=2)
      >>> found.predicted.tolist(), found.observed.tolist()
      ([0.25, 0.75], [0.5, 0.5])
    """
    low, high = settings.span(low, high, "returns of failure and success.")
    num_bins = settings.integer("num_bins", num_bins, "must be at least 1.", at_least=1)
    mask, (values,) = masked_constants(mask, values=values)
    outcome = jax.lax.stop_gradient(broadcast("successes", successes, values))
    p = jnp.clip((values - low) / (high - low), 0, 1)
    # A NaN goes to bin 0; the scores are NaN whatever its bin.
    bins = jnp.clip(jnp.nan_to_num(p * num_bins).astype(jnp.int32), 0, num_bins - 1)
    num_tokens = tokens.counts(bins, mask, num_bins)
    predicted = ratio_or_zero(tokens.per_bin(p, bins, mask, num_bins), num_tokens)
    observed = ratio_or_zero(tokens.per_bin(outcome, bins, mask, num_bins), num_tokens)
    gaps = jnp.abs(predicted - observed) * num_tokens.astype(predicted.dtype)
    return Calibration(
        brier=tokens.mean((p - outcome) ** 2, mask),
        ece=ratio_or_zero(jnp.sum(gaps), jnp.sum(num_tokens)),
        predicted=predicted,
        observed=observed,
        tokens=num_tokens,
    )


class BootstrapBias(NamedTuple):
    """Size of the bootstrap bias, its bound, and its ratio to the spread of the advantages.

    Attributes:
      bias: mean of ``|B_t|`` over tokens.
      bound: mean of ``max_k |e_k| (1 - lam^(T-1-t))``, with the maximum over the response; with a
        discount ``max_k |e_k| gamma (1 - lam) (1 - (gamma lam)^(T-1-t)) / (1 - gamma lam)``.
      relative: `bias` over the standard deviation of the advantages.
    """

    bias: Float[Array, ""]
    bound: Float[Array, ""]
    relative: Float[Array, ""]


def bootstrap_bias(
    errors: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    lam: Scalar | Float[ArrayLike, "*#batch #time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
) -> Float[Array, "*batch time"]:
    """Bootstrap bias: the part of each advantage's error that biases the policy gradient.

    Let ``e_t = V_t - V^pi_t`` be the errors of the critic, and 0 after the end. Exactly,

        A_t(V) - A_t(V^pi) = -e_t + B_t
        B_t = (1 - lam) sum_{k >= 1} lam^(k-1) e_{t+k}              (gamma = 1)

    The first term depends on the state alone: it is a baseline and causes no bias. The second
    depends on the action through the states that follow. ``|B_t| <= max |e| (1 - lam^(T-1-t))``,
    and in general it vanishes only with ``lam = 1``.

    **Concern**: value approximation (arXiv 2505.17997), and that decoupling the two lambdas does
    not remove the critic's errors from the policy's advantages (arXiv 2506.03038).

    **Reading it.** Compare with the standard deviation of the advantages (`bootstrap_bias_bound`):
    if the bias comes near it, the policy learns the critic's errors. It is largest early in a
    response and falls to 0 on the last token.

    Args:
      errors: of the critic, in units of reward. If V^pi is unknown, ``V - G`` with a Monte-Carlo
        return G has these errors as its mean: average the result over responses before taking
        magnitudes, because the magnitude of a noisy bias is too large.
      mask: true on sampled tokens.
      lam: of the advantages; a scalar or an array that broadcasts, as for `gae`.
      gamma: discount of the advantages.

    Returns:
      ``B_t`` of each token, 0 where the mask is false; without a gradient.

    Examples:
      >>> errors = jnp.array([0.2, 0.15, 0.1, 0.05, 0.02])
      >>> [round(float(b), 6) for b in bootstrap_bias(errors, jnp.ones(5), 0.9)]
      [0.029508, 0.01612, 0.0068, 0.002, 0.0]
    """
    mask, (errors,) = masked_constants(mask, errors=errors)
    # Advantages are linear in rewards and values: the errors alone have advantages -e_t + B_t.
    return gae(jnp.zeros_like(errors), errors, mask, gamma=gamma, lam=lam)[1]


def bootstrap_bias_bound(
    errors: Float[ArrayLike, "*batch time"],
    advantages: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    lam: Scalar | Float[ArrayLike, "*#batch #time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
) -> BootstrapBias:
    """Mean size of the bootstrap bias, its bound, and its ratio to the spread of the advantages.

    **Concern**: as for `bootstrap_bias`.

    **Reading it.** ``relative`` near 0: errors of the critic do not reach the policy. Near 1: the
    policy learns the critic's errors as much as the rewards. Then raise lam, or train the critic
    longer.

    Args:
      errors: of the critic, in units of reward, see `bootstrap_bias`.
      advantages: advantages of the policy loss, in the same units (before whitening).
      mask: true on sampled tokens.
      lam: of the advantages; a scalar or an array that broadcasts, as for `gae`.
      gamma: discount of the advantages.

    Returns:
      A `BootstrapBias`.

    Examples:
      >>> errors = jnp.array([[0.5, 0.5]])
      >>> found = bootstrap_bias_bound(errors, jnp.array([[1.0, -1.0]]), jnp.ones((1, 2)), 0.5)
      >>> float(found.bias), float(found.bound), float(found.relative)
      (0.125, 0.125, 0.125)
    """
    mask, (errors, advantages) = masked_constants(mask, errors=errors, advantages=advantages)
    bias = bootstrap_bias(errors, mask, lam, gamma=gamma)
    largest = jnp.max(jnp.abs(errors), axis=-1, keepdims=True, initial=0)
    # The bias is largest when all errors have one size and sign.
    bound = largest * bootstrap_bias(jnp.ones_like(errors), mask, lam, gamma=gamma)
    centre = tokens.mean(advantages, mask)
    deviation = jnp.sqrt(tokens.mean((advantages - centre) ** 2, mask))
    size = tokens.mean(jnp.abs(bias), mask)
    return BootstrapBias(size, tokens.mean(bound, mask), ratio_or_zero(size, deviation))
