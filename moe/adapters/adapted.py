"""A weight with a LoRA adapter, and matrix products with it."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

Leaf = TypeVar("Leaf")
Product = Callable[[Array, Any], Array]
"""(x, matrix) -> ``x matrix``, of whatever axes."""


@struct.dataclass
class Adapted(Generic[Leaf]):
    """The weight ``W + s A B``, which is never materialised in training.

    Attributes:
      base: ``W``, frozen.
      a: the axes that `base` is summed over, and the rank.
      b: the rank, and the other axes of `base`. (The names are PEFT's ``lora_A``, ``lora_B``.)
      scale: ``s``.
    """

    base: Leaf
    a: Leaf
    b: Leaf
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        base: Any = self.base
        return base.shape


Matrix = Array | Adapted[Array]


def product(
    dot: Product,
    x: Array,
    weight: Matrix,
    dot_a: Product = jnp.matmul,
    dot_b: Product = jnp.matmul,
) -> Array:
    """``x W``, of an adapted weight ``x W + s (x A) B``.

    A and B are cast to the dtype of `x` where they are used, as weights are; their products are
    rounded to it. They are sharded as the axes of W are, so that where `dot` gives partial sums
    over ``tp`` or ``etp``, they give partial sums too.

    Args:
      dot: the product with W.
      dot_a: the product with A.
      dot_b: the product with B.
    """
    if not isinstance(weight, Adapted):
        return dot(x, weight)
    low_rank = dot_a(x, weight.a.astype(x.dtype)) * weight.scale
    return dot(x, weight.base) + dot_b(low_rank, weight.b.astype(x.dtype))
