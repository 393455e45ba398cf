"""Grouped GEMM: rows times the matrix of their group, at a cost proportional to the number of rows.

Rows are sorted by group. `jax.lax.ragged_dot` is the same operation, but where XLA has no kernel
for it every row is multiplied by every matrix. Each implementation consists of a forward product,
the same with the matrices transposed, and the sum of products over the rows of a group;
`grouped_dot` combines them to one differentiable function.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.experts.grouped_batched import batched_multiply, batched_sum
from moe.experts.grouped_loops import blocks_multiply, blocks_sum, tiles_multiply, tiles_sum
from moe.kernels import grouped, megablox
from moe.ops.sorting import group_of_rows
from sharding.collectives import match_varying


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


def cast_matrices(
    weights: Float[Array, "group inner *outer"], rows: Array
) -> Float[Array, "group inner columns"]:
    """Weights cast to the dtype of the rows, with their columns flattened to one dimension."""
    return weights.astype(rows.dtype).reshape(*weights.shape[:2], -1)


def plain_multiply(side, rows, weights, sizes):
    in_group = jax.nn.one_hot(group_of_rows(sizes, rows.shape[0]), weights.shape[0], dtype=bool)
    # Set to zero before multiplying: rows of no group may hold NaN or infinity, and zero times
    # these is not zero.
    rows = jnp.where(in_group.any(axis=1)[:, None], rows, 0)
    formula = ("ri,gio->rgo", "ro,gio->rgi")[side]
    products = jnp.einsum(formula, rows, weights, preferred_element_type=jnp.float32)
    return jnp.sum(products, axis=1, where=in_group[:, :, None]).astype(rows.dtype)


def plain_sum(rows, others, sizes):
    in_group = jax.nn.one_hot(group_of_rows(sizes, rows.shape[0]), sizes.shape[0], dtype=bool)
    rows, others = (jnp.where(in_group.T[:, :, None], x[None], 0) for x in (rows, others))
    return jnp.einsum("gri,gro->gio", rows, others, preferred_element_type=jnp.float32)


def ragged_multiply(side, rows, weights, sizes):
    dimensions = lax.RaggedDotDimensionNumbers((((1,), (1 + side,)), ((), ())), [0], [0])
    out = lax.ragged_dot_general(
        rows, weights, sizes, dimensions, preferred_element_type=jnp.float32
    )
    return out.astype(rows.dtype)


_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def ragged_sum(rows, others, sizes):
    in_group = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
    rows, others = jnp.where(in_group, rows, 0), jnp.where(in_group, others, 0)
    return lax.ragged_dot_general(
        rows, others, sizes, _CONTRACT_ROWS, preferred_element_type=jnp.float32
    )


def mosaic_multiply(side, rows, weights, sizes):
    grouped.require_support(rows, weights.shape[2 - side])
    return grouped.multiply_rows(side, rows, weights, sizes)


def mosaic_sum(rows, others, sizes):
    grouped.require_support(rows, others.shape[1])
    return grouped.sum_products(rows, others, sizes)


def grouped_dot(
    rows: Float[Array, "row inner"],
    weights: Float[Array, "group inner *outer"],
    sizes: Int[Array, "group"],
    *,
    implementation: str | None = None,
    most: int | None = None,
) -> Float[Array, "row outer"]:
    """``out[r] = rows[r] @ weights[g]``, ``g`` the group of row ``r``.

    The first ``sizes[0]`` rows belong to group 0, the next ``sizes[1]`` to group 1, and so on. Rows
    past the sum of `sizes` belong to none: their result is 0, and whatever they hold reaches
    neither a result nor a gradient. Matrices are cast to the dtype of the rows where they are used.
    Products are summed in float32, those of the matrices' gradient over all rows of a group.

    Args:
      rows: sorted by group.
      weights: one matrix per group. The axes after the inner dimension are its columns in memory
        order; they are flattened where they are used, and saved for the gradient as they are.
      sizes: number of rows of each group; none negative, in total at most the number of rows.
      implementation: "tiles" loops over the existing rows, in tiles that each use one matrix;
        "batched" pads the groups to one batched product, in few kernels
        (`moe.experts.grouped_batched`); "blocks" loops over a static number of whole blocks;
        "mosaic" are kernels for NVIDIA's Hopper, for rows in half precision and dimensions that are
        multiples of 64; "megablox" are JAX's kernels for TPUs; "ragged_dot" is XLA's; "plain" is
        the reference implementation, each row times each matrix. None is "tiles" on a CPU,
        "blocks" on a TPU and "batched" elsewhere.
      most: largest number of rows that a group can have, if it is less than all of them: "batched"
        needs no loop where it is small.

    Raises:
      ValueError: `implementation` is none of these, or a kernel that does not support the call.

    References:
      Gale et al., "MegaBlocks", 2022 (rows in blocks of one expert). https://arxiv.org/abs/2211.15841
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} of grouped_dot is not known: choose among "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}, or None for the best that applies."
        )
    # The loops carry sums of products, which vary over every mesh axis that an operand varies over.
    return _grouped_dot(*match_varying((rows, weights, sizes)), implementation, most)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_dot(rows, weights, sizes, implementation, most):
    return _select_implementation(implementation, most).multiply_rows(
        0, rows, cast_matrices(weights, rows), sizes
    )


def _forward(rows, weights, sizes, implementation, most):
    return _grouped_dot(rows, weights, sizes, implementation, most), (rows, weights, sizes)


def _backward(implementation, most, residuals, grad_out):
    rows, weights, sizes = residuals
    # Both gradients are grouped products again; sizes are integers and have none.
    product = _select_implementation(implementation, most)
    grad_rows = product.multiply_rows(1, grad_out, cast_matrices(weights, rows), sizes)
    grad_weights = product.sum_products(rows, grad_out, sizes)
    return grad_rows, grad_weights.astype(weights.dtype).reshape(weights.shape), None


_grouped_dot.defvjp(_forward, _backward)


IMPLEMENTATIONS = {
    "tiles": Implementation(tiles_multiply, tiles_sum),
    "batched": Implementation(batched_multiply, batched_sum),
    "blocks": Implementation(blocks_multiply, blocks_sum),
    "mosaic": Implementation(mosaic_multiply, mosaic_sum),
    "megablox": Implementation(megablox.multiply_rows, megablox.sum_products),
    "ragged_dot": Implementation(ragged_multiply, ragged_sum),
    "plain": Implementation(plain_multiply, plain_sum),
}


LOOPS_AND_BATCHES = ("tiles", "batched", "blocks")
"""Names of plain JAX, for rows and matrices of any size; None is one of them."""


def _best_multiply(most, side, *operands):
    """Forward product by the best implementation of each platform.

    A GPU launches several kernels in every iteration of a loop and, where its length is dynamic,
    waits for its host: "tiles" and "blocks" would be tens of thousands of launches a layer there. A
    TPU runs a loop by itself.
    """
    return lax.platform_dependent(
        *operands,
        cpu=partial(tiles_multiply, side),
        tpu=partial(blocks_multiply, side),
        default=partial(batched_multiply, side, most=most),
    )


def _best_sum(most, *operands):
    return lax.platform_dependent(
        *operands, cpu=tiles_sum, tpu=blocks_sum, default=partial(batched_sum, most=most)
    )


def _select_implementation(name: str | None, most: int | None) -> Implementation:
    """The named implementation; for None, the best of each platform."""
    if name is None:
        return Implementation(partial(_best_multiply, most), partial(_best_sum, most))
    if name == "batched":
        return Implementation(partial(batched_multiply, most=most), partial(batched_sum, most=most))
    return IMPLEMENTATIONS[name]
