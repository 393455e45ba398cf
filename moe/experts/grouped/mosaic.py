"""Grouped GEMM by kernels for NVIDIA's Hopper ("mosaic")."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe.kernels import grouped
from moe.kernels.choice import foreign_gpus


def obstacle(rows: Array | jax.ShapeDtypeStruct, width: int) -> str | None:
    """The reason why the kernels do not support these rows, this width of the result, or this
    process's GPUs; None if they do."""
    foreign = foreign_gpus(hopper_only=True)
    if foreign is not None:
        return foreign
    if rows.dtype not in (jnp.bfloat16, jnp.float16):
        return f"rows of {rows.dtype} (needs bfloat16 or float16)"
    if any(dimension % 64 or not dimension for dimension in (rows.shape[1], width)):
        return f"matrices of {rows.shape[1]} x {width} (both must be multiples of 64)"
    return None


def mosaic_multiply(side, rows, weights, sizes):
    require_support(rows, weights.shape[2 - side])
    return grouped.multiply_rows(side, rows, weights, sizes)


def mosaic_sum(rows, others, sizes):
    require_support(rows, others.shape[1])
    return grouped.sum_products(rows, others, sizes)


def require_support(
    rows: Array | jax.ShapeDtypeStruct,
    width: int,
    name: str = "mosaic",
    operation: str = "grouped_dot",
) -> None:
    """Raises if the kernels do not support these rows and this width of the result.

    Raises:
      ValueError: with the reason and the fix.
    """
    reason = obstacle(rows, width)
    if reason is not None:
        raise ValueError(
            f'implementation="{name}" of {operation} does not support {reason}: use "blocks", or '
            "None for the best that applies."
        )
