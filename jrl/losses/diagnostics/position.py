"""Accuracy of a critic by relative position in the response."""

from typing import NamedTuple, SupportsIndex

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Shaped

from jrl.losses import settings
from jrl.losses.arrays import check_shapes
from jrl.losses.diagnostics import tokens


class ByPosition(NamedTuple):
    """One entry per bin of relative position, from the first tokens of responses to the last.

    Attributes:
      explained_variance: ``1 - Var(G - V) / Var(G)`` of the tokens of the bin; 0 where the returns
        do not vary.
      bias: mean of ``V - G``.
      error: root of the mean of ``(V - G)^2``.
      tokens: how many lie there.
    """

    explained_variance: Float[Array, "bins"]
    bias: Float[Array, "bins"]
    error: Float[Array, "bins"]
    tokens: Int[Array, "bins"]


def relative_position(
    mask: Shaped[ArrayLike, "*batch time"], *, num_bins: SupportsIndex = 10
) -> Int[Array, "*batch time"]:
    """In which part of its response each token lies: ``floor(num_bins t / T)``.

    Args:
      mask: true on sampled tokens; t and T count these alone.
      num_bins: parts; 10 are deciles.

    Returns:
      Integers in ``0..num_bins - 1``, 0 where the mask is false.

    Raises:
      ValueError: if `num_bins` is not positive.

    Examples:
      >>> import jax.numpy as jnp
      >>> relative_position(jnp.array([1, 1, 0, 1, 1]), num_bins=2).tolist()
      [0, 0, 0, 1, 1]
    """
    num_bins = settings.integer("num_bins", num_bins, "must be at least 1.", at_least=1)
    mask, _ = tokens.hidden(mask)
    length = jnp.maximum(tokens.count(mask, -1), 1)[..., None]
    return jnp.where(mask, num_bins * tokens.index(mask) // length, 0)


def by_position(
    values: Float[ArrayLike, "*batch time"],
    returns: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    num_bins: SupportsIndex = 10,
) -> ByPosition:
    """Explained variance and bias of the critic along responses, from their start to their end.

    **Concern**: value approximation over long horizons (2505.17997), and whether one value can
    stand for a goal that lies far ahead (2506.03038).

    **Reading it.** Near the end a critic sees the answer, and explained variance should come near
    1. If it falls towards the start faster than the task demands, the critic cannot see ahead. It
    need not be 1 there: what the first tokens do not determine cannot be explained. A bias far
    from 0 in the first bins is the failure that value pretraining (VC-PPO) is to prevent; a bias
    of one sign throughout is a critic that lags behind the policy.

    Args:
      values: the critic's estimates.
      returns: Monte-Carlo returns, that is, those of `gae` with ``lam=1``. With a smaller lam they
        contain the values that they are to judge.
      mask: true on sampled tokens.
      num_bins: parts of a response; 10 are deciles.

    Returns:
      A `ByPosition`.

    Raises:
      ValueError: if `num_bins` is not positive, or shapes do not agree.

    References:
      Yuan et al., "VC-PPO", 2025, section 3 (value bias). https://arxiv.org/abs/2503.01491

    Examples:
      >>> import jax.numpy as jnp
      >>> values, returns = jnp.array([[0.5, 1.0], [0.5, 0.0]]), jnp.array([[1.0, 1.0], [0.0, 0.0]])
      >>> found = by_position(values, returns, jnp.ones((2, 2)), num_bins=2)
      >>> found.explained_variance.tolist(), found.error.tolist()
      ([0.0, 1.0], [0.5, 0.0])
    """
    check_shapes(values=values, returns=returns, mask=mask)
    num_bins = settings.integer("num_bins", num_bins, "must be at least 1.", at_least=1)
    bins = relative_position(mask, num_bins=num_bins)
    mask, (values, returns) = tokens.hidden(mask, values, returns)
    number = tokens.counts(bins, mask, num_bins)

    def mean_of(x: Float[Array, "*batch time"]) -> Float[Array, "bins"]:
        return tokens.ratio(tokens.per_bin(x, bins, mask, num_bins), number)

    error = values - returns
    bias, centre = mean_of(error), mean_of(returns)
    # Two passes: a variance by the difference of large squares would have no digits left.
    unexplained = mean_of((error - bias[bins]) ** 2)
    variance = mean_of((returns - centre[bins]) ** 2)
    # Equal returns differ from their mean by what it was rounded by, a small part of their size.
    rounding = 64 * jnp.finfo(variance.dtype).eps
    flat = variance <= rounding**2 * mean_of(returns**2)
    explained = 1 - unexplained / jnp.where(flat, jnp.ones_like(variance), variance)
    return ByPosition(
        explained_variance=jnp.where(flat, jnp.zeros_like(explained), explained),
        bias=bias,
        error=jnp.sqrt(mean_of(error**2)),
        tokens=number,
    )
