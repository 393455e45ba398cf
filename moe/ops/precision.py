"""Computations in float32 for any device and any dtype of activations: norms, products that decide
the selection of experts or a value, and sums of gradients.

By default a GPU or a TPU rounds the float32 factors of a product (to TF32, to bfloat16): enough to
change the experts that a token selects, and its value.
"""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Tree = TypeVar("Tree")

MASK_VALUE = -1e30
"""Score of hidden or uncounted positions. With the lowest float, rows that see no position would
become NaN in lower precisions when their maximum is subtracted; with a large finite number they
never do."""


def float32_product(
    a: Float[Array, "*token inner"], b: Float[Array, "inner *outer"]
) -> Float[Array, "..."]:
    """``a b`` of float32 arrays at full float32 precision."""
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
def shared(weights: Tree, num_uses: int) -> tuple[Tree, ...]:
    """Returns the weights once for each part of a batch. The gradients of the parts are summed in
    float32 and rounded once."""
    return (weights,) * num_uses


def _shared_forward(weights: Any, num_uses: int) -> tuple[Any, None]:
    return shared(weights, num_uses), None


def _shared_backward(num_uses: int, _: None, gradients: Any) -> tuple[Any]:
    def add(*leaves: Array) -> Array:
        first, *others = (leaf.astype(jnp.float32) for leaf in leaves)
        return sum(others, first).astype(leaves[0].dtype)

    return (jax.tree.map(add, *gradients),)


shared.defvjp(_shared_forward, _shared_backward)
