"""The critic's head and its loss, and how much of the returns it explains."""

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
    """A value between two bounds from what the critic's head gives, which has none.

        V = low + (high - low) (1/2 + atan(x) / pi)

    A critic that cannot leave the range of the returns makes no temporal-difference error larger
    than the reward can. 0 gives the middle, and unlike the sigmoid's the slope,
    ``(high - low) / (pi (1 + x^2))``, falls only with the square of the distance: a critic that
    was sure and wrong still learns.

    Args:
      x: the output of the value head, any number.
      low: the least return that is possible, in units of reward.
      high: the greatest.

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
    """Half the squared error of the critic, optionally clipped as PPO clips its policy.

    With ``V' = clip(V, V_old - low, V_old + high)``,

        l = max((V - G)^2, (V' - G)^2) / 2

    The gradient of a token is 0 where the clipped error is strictly the larger: the critic has
    moved far enough towards the return within this batch.

    Args:
      values: the critic's estimates now.
      old_values: its estimates when the batch was collected; no gradient, read only for the clip.
      returns: what to regress on, such as the second result of `gae`; no gradient.
      mask: true on sampled tokens.
      clip: how far a value may move, in units of reward: one distance, or two as (down, up). None
        is off. (verl: 0.5; verl's T-PPO: 0.5 down and 0.6 up; OpenRLHF: off.)
      aggregation: how to weigh tokens and sequences, see `aggregate`.
      denominators: those of `aggregate`, such as `num_tokens`.

    Returns:
      `(loss, metrics)`. The metrics add up over micro-batches and devices.

      * ``vf_clipfrac``: where the clip binds, of the true tokens;
      * ``vpred_mean``: of the true tokens;
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
    values = zero_masked(values, mask)
    old_values, returns = jax.lax.stop_gradient((old_values, returns))

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
    """The sums behind an explained variance, which itself is not additive.

    Records of pieces add up as `Mean` does, and `value` is then that of everything together.

    Attributes:
      count: tokens.
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
        """The sums over the true tokens of one piece, without a gradient.

        `centre` is a number near the mean return, the same for every piece. It changes no result
        but for rounding, and matters where returns vary by less than a hundredth of their size.
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
        """``1 - Var(G - V) / Var(G)``; 0 where the returns do not vary, beyond rounding."""
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
    """How much of the variance of the returns the critic explains: ``1 - Var(G - V) / Var(G)``.

    1 is a perfect critic (up to a constant), 0 is one that knows no more than a constant does, and
    below 0 it is worse than none. For a batch in pieces, add up `ExplainedVariance` records: the
    mean of the pieces' explained variances is a different number.

    Args:
      values: the critic's estimates.
      returns: what they are compared with.
      mask: true on the tokens that count.

    Returns:
      The explained variance, without a gradient; 0 where the returns do not vary.

    Examples:
      >>> returns = jnp.array([0.0, 1.0, 2.0, 3.0])
      >>> float(explained_variance(returns / 2, returns, jnp.ones(4)))
      0.75
    """
    check_shapes(values=values, returns=returns, mask=mask)
    centre = jax.lax.stop_gradient(masked_mean(returns, mask))
    return ExplainedVariance.of(values, returns, mask, centre).value()
