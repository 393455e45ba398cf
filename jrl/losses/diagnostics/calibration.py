"""Calibration of a critic: agreement of its values with the frequency of success."""

from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, as_floats, broadcast, check_shapes
from jrl.losses.diagnostics import tokens


class Calibration(NamedTuple):
    """How well predicted probabilities of success fit its frequency.

    Attributes:
      brier: mean of ``(p - success)^2``. Always saying 1/2 scores 0.25; 0 is perfect.
      ece: expected calibration error, the mean over tokens of ``|predicted - observed|`` of their
        bin, in [0, 1].
      predicted: ``[bins]`` mean p of each bin, 0 in empty ones.
      observed: ``[bins]`` share of successes in each bin, 0 in empty ones.
      tokens: ``[bins]`` how many lie there.
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

    With a reward of `low` for failure and `high` for success and no discount, a value says that
    the response succeeds with probability ``p = (V - low) / (high - low)``, clipped to [0, 1].

    **Concern**: value approximation (2505.17997): a critic may explain some variance and still be
    wrong about how likely success is, which shifts every advantage that bootstraps from it.

    **Reading it.** On the curve of observed against predicted a calibrated critic lies on the
    diagonal. Below it the critic is too sure of success, above it not sure enough. A flat curve
    is a critic that tells nothing apart; its calibration error may still be small, so look at the
    Brier score as well. Tokens of one response share one outcome: error bars must count responses.

    Args:
      values: the critic's estimates, in units of reward.
      successes: whether the response succeeded, bool or 0/1; ``[batch, 1]`` for one per row.
      mask: true on sampled tokens.
      low: the return of a failure.
      high: the return of a success.
      num_bins: bins of equal width in p.

    Returns:
      A `Calibration`.

    Raises:
      ValueError: unless `low` is below `high` and `num_bins` positive, or if shapes do not agree.

    References:
      Brier, "Verification of forecasts expressed in terms of probability", 1950.
      Naeini et al., "Obtaining well calibrated probabilities using Bayesian binning", 2015.

    Examples:
      >>> import jax.numpy as jnp
      >>> values, success = jnp.array([[0.75, 0.25], [0.25, 0.75]]), jnp.array([[True], [False]])
      >>> found = calibration(values, success, jnp.ones((2, 2)), num_bins=2)
      >>> found.predicted.tolist(), found.observed.tolist()
      ([0.25, 0.75], [0.5, 0.5])
    """
    low, high = settings.span(low, high, "returns of failure and success.")
    num_bins = settings.integer("num_bins", num_bins, "must be at least 1.", at_least=1)
    check_shapes(values=values, mask=mask)
    mask, (values,) = tokens.hidden(mask, values)
    outcome = jax.lax.stop_gradient(broadcast("successes", successes, values))
    p = jnp.clip((values - low) / (high - low), 0, 1)
    # A NaN has no bin; it shows in the scores, whichever bin it is put into.
    bins = jnp.clip(jnp.nan_to_num(p * num_bins).astype(jnp.int32), 0, num_bins - 1)
    number = tokens.counts(bins, mask, num_bins)
    predicted = tokens.ratio(tokens.per_bin(p, bins, mask, num_bins), number)
    observed = tokens.ratio(tokens.per_bin(outcome, bins, mask, num_bins), number)
    (weights,) = as_floats(number)
    gaps = jnp.abs(predicted - observed) * weights.astype(predicted.dtype)
    return Calibration(
        brier=tokens.mean((p - outcome) ** 2, mask),
        ece=tokens.ratio(jnp.sum(gaps), jnp.sum(number)),
        predicted=predicted,
        observed=observed,
        tokens=number,
    )
