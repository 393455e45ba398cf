"""Interface of grouped GEMM implementations, and the group of each row."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class Implementation(NamedTuple):
    """The two products that a grouped product and its gradient are made of.

    Attributes:
      multiply_rows: ``(side, rows, weights, sizes)``, each row times the matrix of its group,
        contracted over dimension `side` of it: 0 is the product, 1 the one with the matrices
        transposed.
      sum_products: ``(rows [row inner], others [row outer], sizes) -> [group inner outer]``, the
        sum of ``rows[r]^T others[r]`` over the rows of a group, float32.
    """

    multiply_rows: Callable[..., Any]
    sum_products: Callable[..., Any]


def group_of_rows(sizes: Array, num_rows: int) -> Array:
    """Group of each row, one past the last for a row of none."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(num_rows, dtype=sizes.dtype), "right")
