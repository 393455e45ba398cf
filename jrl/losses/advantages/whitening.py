"""Advantages scaled by the statistics of the whole batch."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import Number, masked_constants, num_true, ratio_or_zero, zero_masked

__all__ = ["whiten"]


def whiten(
    x: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    unbiased: bool = True,
    keep_mean: bool = False,
    epsilon: Number = 1e-8,
    min_variance: Number | None = None,
) -> Float[Array, "*batch time"]:
    """Scale to unit variance, and shift to zero mean, over the true tokens of the whole batch.

    ``(x - mean) / sqrt(max(variance, min_variance) + epsilon)``. It makes the advantage of a token
    depend on which other responses are in the batch, so only those estimators do it by themselves
    whose papers have it in their formula. The statistics are those of the array that is passed, so
    pass the whole batch, not a micro-batch or one device's part of it.

    The defaults are those of verl. OpenRLHF's form is ``unbiased=False, epsilon=0.0,
    min_variance=1e-8``.

    Args:
      x: usually advantages.
      mask: true on the tokens that count.
      unbiased: divide the squares by ``n - 1`` (as verl does) rather than ``n`` (as OpenRLHF does).
      keep_mean: add the mean back, so that only the scale changes.
      epsilon: added to the variance, inside the root.
      min_variance: the least that the variance is taken for; None takes it as it is.

    Returns:
      The whitened tokens, 0 where the mask is false, without a gradient. A single true token has
      no variance: it becomes 0 (or stays what it is, with `keep_mean`), as do several equal ones
      but for a rounding. (verl raises an error.)

    Raises:
      ValueError: if `epsilon` or `min_variance` is negative.

    References:
      Huang et al., "The 37 implementation details of proximal policy optimization", 2022, 7.
      https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/

    Examples:
      >>> whiten(jnp.array([1.0, 3.0, 9.0]), jnp.array([1, 1, 0]), unbiased=False).tolist()
      [-1.0, 1.0, 0.0]
    """
    rule = "must not be negative: a variance is not; 0 leaves it as it is."
    epsilon = settings.number("epsilon", epsilon, rule, at_least=0)
    min_variance = settings.optional("min_variance", min_variance, rule, at_least=0)
    mask, (x,) = masked_constants(mask, x=x)
    count = num_true(mask).astype(x.dtype)
    mean = jnp.sum(x) / jnp.maximum(count, 1)
    centred = zero_masked(x - mean, mask)
    variance = jnp.sum(centred**2) / jnp.maximum(count - 1 if unbiased else count, 1)
    if min_variance is not None:
        variance = jnp.maximum(variance, min_variance)
    scaled = ratio_or_zero(centred, jnp.broadcast_to(jnp.sqrt(variance + epsilon), centred.shape))
    return zero_masked(scaled + mean, mask) if keep_mean else scaled
