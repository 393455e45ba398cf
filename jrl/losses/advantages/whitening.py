"""Advantages scaled by the statistics of the whole batch."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Number, as_floats, as_mask, check_shapes, keep


def whiten(
    x: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    unbiased: bool = True,
    keep_mean: bool = False,
    epsilon: Number = 1e-8,
) -> Float[Array, "*batch time"]:
    """Scale to unit variance, and shift to zero mean, over the true tokens of the whole batch.

    ``(x - mean) / sqrt(variance + epsilon)``. No estimator or loss here does it by itself: it
    makes the advantage of a token depend on which other responses are in the batch. The statistics
    are those of the array that is passed, so pass the whole batch, not a micro-batch or one
    device's part of it.

    Args:
      x: usually advantages.
      mask: true on the tokens that count.
      unbiased: divide the squares by ``n - 1`` (as verl does) rather than ``n`` (as OpenRLHF does).
      keep_mean: add the mean back, so that only the scale changes.
      epsilon: added to the variance, inside the root.

    Returns:
      The whitened tokens, 0 where the mask is false, without a gradient. A single token has no
      variance: it becomes 0 (or stays what it is, with `keep_mean`).

    >>> import jax.numpy as jnp
    >>> whiten(jnp.array([1.0, 3.0, 9.0]), jnp.array([1, 1, 0]), unbiased=False).tolist()
    [-1.0, 1.0, 0.0]
    """
    check_shapes(x=x, mask=mask)
    mask = as_mask(mask)
    (x,) = as_floats(jax.lax.stop_gradient(x))
    x = keep(x, mask)
    count = jnp.sum(mask, dtype=jnp.int32).astype(x.dtype)
    mean = jnp.sum(x) / jnp.maximum(count, 1)
    centred = keep(x - mean, mask)
    variance = jnp.sum(centred**2) / jnp.maximum(count - 1 if unbiased else count, 1)
    scaled = centred * jax.lax.rsqrt(variance + epsilon)
    return keep(scaled + mean, mask) if keep_mean else scaled
