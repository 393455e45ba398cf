"""What is computed in float32 whatever the device and the dtype of activations: norms, products on
which a choice of experts or a value hangs, and sums of gradients.

By default a GPU or a TPU shortens the float32 factors of a product (to TF32, to bfloat16): enough
to change which experts a token takes, and what its value is.
"""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Tree = TypeVar("Tree")

MASK_VALUE = -1e30
"""Score of what is not visible or not counted. The lowest float would make rows without anything
visible NaN after the subtraction of their maximum in lower precisions; a large finite number never
does."""


def float32_product(
    a: Float[Array, "*token inner"], b: Float[Array, "inner *outer"]
) -> Float[Array, "..."]:
    """``a b`` of float32 arrays, no digit of theirs left out."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


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


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared(weights: Tree, parts: int) -> tuple[Tree, ...]:
    """The weights for each part of what they are used on. The gradients of the parts are added up
    in float32 and rounded once."""
    return (weights,) * parts


def _shared_forward(weights: Any, parts: int) -> tuple[Any, None]:
    return shared(weights, parts), None


def _shared_backward(parts: int, _: None, gradients: Any) -> tuple[Any]:
    def add(*leaves: Array) -> Array:
        first, *others = (leaf.astype(jnp.float32) for leaf in leaves)
        return sum(others, first).astype(leaves[0].dtype)

    return (jax.tree.map(add, *gradients),)


shared.defvjp(_shared_forward, _shared_backward)
