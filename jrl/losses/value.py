"""Critic: bounded value head, clipped value loss, and explained variance."""

from dataclasses import dataclass
from typing import Generic, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_floats,
    as_mask,
    check_shapes,
    masked_constants,
    num_true,
    zero_masked,
)
from jrl.losses.reduction import (
    Additive,
    Aggregation,
    Denominators,
    Leaf,
    Mean,
    aggregate,
    check_denominators,
    divide,
    masked_mean,
)


def bounded_value(
    x: Float[ArrayLike, "*shape"], *, low: Number, high: Number
) -> Float[Array, "*shape"]:
    """Bounded value head: maps the unbounded output of the critic's head to the range of returns.

        V = low + (high - low) (1/2 + atan(x) / pi)

    Values within the range of the returns bound the temporal-difference errors. ``x = 0`` gives the
    midpoint. The slope, ``(high - low) / (pi (1 + x^2))``, decreases only quadratically, not
    exponentially as a sigmoid's, so saturated wrong values still have a gradient.

    Args:
      x: output of the value head, any number.
      low: smallest possible return, in units of reward.
      high: largest possible return.

    Returns:
      Values in [low, high], with their gradient.

    Raises:
      ValueError: unless `low` is below `high`.

    References:
      BPCO, 2026 (bounded value head). https://arxiv.org/abs/2608.23566

    Examples:
      >>> bounded_value(jnp.array([-jnp.inf, 0.0, 1.0, jnp.inf]), low=-1.0, high=1.0).tolist()
      [-1.0, 0.0, 0.5, 1.0]
    """
    low, high = settings.span(low, high, "they are the least and the greatest return.")
    (x,) = as_floats(x)
    return low + (high - low) * (0.5 + jnp.arctan(x) / jnp.pi)


def value_loss(
    values: Float[ArrayLike, "*batch time"],
    old_values: Float[ArrayLike, "*batch time"],
    returns: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    clip: settings.Sides | None = None,
    aggregation: Aggregation = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Float[Array, ""], dict[str, "Mean | ExplainedVariance"]]:
    """Value loss of PPO: half the squared error of the critic, optionally clipped.

    With ``V' = clip(V, V_old - low, V_old + high)``,

        l = max((V - G)^2, (V' - G)^2) / 2

    The gradient of a token is 0 where the clipped error is strictly larger: its value has moved
    beyond the clip range towards the return.

    Args:
      values: current estimates of the critic.
      old_values: its estimates when the batch was collected; no gradient, used only for the clip.
      returns: regression targets, such as the second result of `gae`; no gradient.
      mask: true on sampled tokens.
      clip: clip range around `old_values`, in units of reward: one distance, or two as (down, up).
        None disables it. (verl: 0.5; verl's T-PPO: 0.5 down and 0.6 up; OpenRLHF: off.)
      aggregation: weighting of tokens and sequences, see `aggregate`.
      denominators: arguments of `aggregate`, such as `num_tokens`.

    Returns:
      `(loss, metrics)`. The metrics add up over micro-batches and devices.

      * ``vf_clipfrac``: clipped fraction of the unmasked tokens;
      * ``vpred_mean``: mean of `values` over the unmasked tokens;
      * ``vf_explained_var``: an `ExplainedVariance` of the returns by the values.

    Raises:
      ValueError: if a distance is negative.

    References:
      Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 9, and its published
      code for the clip. https://arxiv.org/abs/1707.06347

    Examples:
      >>> values, old, returns = jnp.array([0.9]), jnp.array([0.5]), jnp.array([1.0])
      >>> loss, _ = value_loss(values, old, returns, jnp.ones(1), clip=0.25)
      >>> round(float(loss), 5) == round((1 - 0.75) ** 2 / 2, 5)
      True
    """
    check_shapes(values=values, old_values=old_values, returns=returns, mask=mask)
    mask = as_mask(mask)
    values, old_values, returns = as_floats(values, old_values, returns)
    old_values, returns = jax.lax.stop_gradient((old_values, returns))
    values, old_values, returns = (zero_masked(x, mask) for x in (values, old_values, returns))

    errors = (values - returns) ** 2
    binds = jnp.zeros_like(mask)
    if clip is not None:
        down, up = settings.distance_pair("clip", clip, "None is off")
        bounded = (jnp.clip(values, old_values - down, old_values + up) - returns) ** 2
        binds = bounded > errors
        errors = jnp.where(binds, bounded, errors)
    check_denominators(value_loss, denominators)
    loss = aggregate(errors / 2, mask, aggregation, **denominators)
    return loss, {
        "vf_clipfrac": Mean.of(binds.astype(errors.dtype), mask),
        "vpred_mean": Mean.of(values, mask),
        "vf_explained_var": ExplainedVariance.of(values, returns, mask),
    }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExplainedVariance(Additive, Generic[Leaf]):
    """Explained variance of the returns by the values, as a record of sums.

    Records of micro-batches add up, as `Mean` does; `value` is then for the whole batch.

    Attributes:
      count: number of unmasked tokens.
      error_sum: sum of ``G - V``.
      error_squares: sum of ``(G - V)^2``.
      return_sum: sum of ``G - centre``.
      return_squares: sum of ``(G - centre)^2``.
    """

    count: Leaf
    error_sum: Leaf
    error_squares: Leaf
    return_sum: Leaf
    return_squares: Leaf

    @classmethod
    def of(
        cls,
        values: Float[ArrayLike, "*batch time"],
        returns: Float[ArrayLike, "*batch time"],
        mask: Shaped[ArrayLike, "*batch time"],
        centre: Scalar = 0.0,
    ) -> "ExplainedVariance[Array]":
        """Sums over the unmasked tokens of a micro-batch (gradient stopped).

        `centre` is a number near the mean return, the same for all micro-batches. It affects only
        rounding, and matters if returns vary by less than a hundredth of their size.
        """
        mask, (values, returns) = masked_constants(mask, values=values, returns=returns)
        error = returns - values
        centred = zero_masked(returns - jnp.asarray(centre, returns.dtype), mask)
        return ExplainedVariance(
            count=num_true(mask),
            error_sum=jnp.sum(error),
            error_squares=jnp.sum(error**2),
            return_sum=jnp.sum(centred),
            return_squares=jnp.sum(centred**2),
        )

    def value(self) -> Float[Array, ""]:
        """``1 - Var(G - V) / Var(G)``; 0 if the returns do not vary beyond rounding errors."""
        errors, error_square, returns, return_square = (
            divide(jnp.asarray(total), jnp.asarray(self.count))
            for total in (self.error_sum, self.error_squares, self.return_sum, self.return_squares)
        )
        unexplained, variance = error_square - errors**2, return_square - returns**2
        flat = variance <= 64 * jnp.finfo(variance.dtype).eps * return_square
        return jnp.where(flat, 0, 1 - unexplained / jnp.where(flat, 1, variance))


def explained_variance(
    values: Float[ArrayLike, "*batch time"],
    returns: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> Float[Array, ""]:
    """Explained variance of the returns by the critic's values: ``1 - Var(G - V) / Var(G)``.

    1 is a perfect critic (up to a constant), 0 is no better than a constant, and below 0 is worse
    than one. Over micro-batches, add up `ExplainedVariance` records: the mean of their explained
    variances is a different number.

    Args:
      values: the critic's estimates.
      returns: the returns to compare with.
      mask: true on sampled tokens.

    Returns:
      The explained variance (gradient stopped); 0 if the returns do not vary.

    Examples:
      >>> returns = jnp.array([0.0, 1.0, 2.0, 3.0])
      >>> float(explained_variance(returns / 2, returns, jnp.ones(4)))
      0.75
    """
    check_shapes(values=values, returns=returns, mask=mask)
    centre = jax.lax.stop_gradient(masked_mean(returns, mask))
    return ExplainedVariance.of(values, returns, mask, centre).value()
