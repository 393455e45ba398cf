"""Advantage whitening: normalisation by the mean and variance of the whole batch."""

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
    """Whitens advantages: zero mean and unit variance over the unmasked tokens of the whole batch.

    ``(x - mean) / sqrt(max(variance, min_variance) + epsilon)``. The advantage of a token then
    depends on the other responses in the batch, so estimators include whitening only where their
    paper's formula does. The statistics are taken over the array `x`: pass the whole batch, not a
    micro-batch or the shard of one device.

    The defaults are verl's. OpenRLHF's form is ``unbiased=False, epsilon=0.0,
    min_variance=1e-8``.

    Args:
      x: usually advantages.
      mask: true on sampled tokens.
      unbiased: divide the squares by ``n - 1`` (as verl does) rather than ``n`` (as OpenRLHF does).
      keep_mean: add the mean back, so that only the scale changes.
      epsilon: added to the variance, inside the root.
      min_variance: lower bound of the variance; None disables it.

    Returns:
      The whitened tokens, 0 where the mask is false (gradient stopped). A single unmasked token
      has no variance and becomes 0 (with `keep_mean` it is unchanged), and so do several equal
      tokens, up to rounding. (verl raises an error.)

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
