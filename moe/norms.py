"""Normalisation of the residual stream and of what is made of it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "token width"], scale: Float[Array, "width"], epsilon: float
) -> Float[Array, "token width"]:
    """``x / sqrt(mean(x^2) + epsilon) * scale``, in float32, returned in the dtype of `x`.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
      https://arxiv.org/abs/1910.07467
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon) * scale[None, :]).astype(x.dtype)
