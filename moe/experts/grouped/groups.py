"""Interface of grouped GEMM implementations, the group of each row, and matrices as they take
them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Implementation(NamedTuple):
    """The two functions that compute a grouped GEMM and its gradients.

    Attributes:
      multiply_rows: ``(side, rows, weights, sizes)``, each row times the matrix of its group,
        contracted over dimension `side` of it: 0 is the product, 1 the one with the matrices
        transposed.
      sum_products: ``(rows [row inner], others [row outer], sizes) -> [group inner outer]``, the
        sum of ``rows[r]^T others[r]`` over the rows of a group, float32.
    """

    multiply_rows: Callable[..., Any]
    sum_products: Callable[..., Any]


def group_of_rows(sizes: Int[Array, "group"], num_rows: int) -> Int[Array, "row"]:
    """Group of each row, one past the last for a row of none."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(num_rows, dtype=sizes.dtype), "right")


def cast_matrices(
    weights: Float[Array, "group inner *outer"], rows: Array
) -> Float[Array, "group inner columns"]:
    """Weights cast to the dtype of the rows, with their columns flattened to one dimension."""
    return weights.astype(rows.dtype).reshape(*weights.shape[:2], -1)
