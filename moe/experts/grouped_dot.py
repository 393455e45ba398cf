"""Grouped GEMM: rows times the matrix of their group, at a cost proportional to the number of rows.

Rows are sorted by group, as for `jax.lax.ragged_dot`, which multiplies every row by every matrix on
devices for which XLA has no kernel. Each implementation consists of a forward product, the same
with the matrices transposed, and the sum of products over the rows of a group; `grouped_dot`
combines them to one differentiable function.

* "tiles" is a loop of plain JAX over groups and tiles of their rows.
* "blocks" is a loop over a static number of blocks, to which groups are padded, as in MegaBlocks: a
  GPU runs it and does not synchronise with the host after each.
* "batched" is a batched GEMM over the groups: few kernels, for GPUs. Groups are padded to equal
  numbers of rows, so that one batched product multiplies every group by its matrix. The matrices
  are read in place and not copied for each block of rows. Rows of a group beyond its padded size
  are multiplied by further turns of a loop, as many as the largest group needs: none if groups are
  balanced. In decoding a group has few rows at most: one turn is enough for any routing, and reads
  each matrix once.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.kernels import grouped
from moe.ops.sorting import group_of_rows, positions_in, take_rows
from sharding.collectives import match_varying

ROWS_PER_READ = 256
"""Rows that a matrix multiplies in about the time that it is read from an accelerator's memory: up
to as many, padding costs no time."""
TURNS = 8
"""Turns that a group of the largest size needs, at least."""
UNIT = 16
"""Padded groups are multiples of as many rows, as matrix units take them."""

TILES = (256, 32)
"""Rows of the tiles that cover a group in the loop of "tiles", larger ones first. Large tiles make
better products, small ones waste less on the end of a group and on short groups."""

LOOPS_AND_BATCHES = ("tiles", "batched", "blocks")
"""Names of plain JAX, for rows and matrices of any size; None is one of them."""


def padded_size(num_rows: int, num_groups: int, most: int | None) -> tuple[int, int]:
    """Rows of each group that one turn multiplies, and largest number of rows that a group can
    have: `most`, or all of them for None."""
    most = num_rows if most is None else min(most, num_rows)
    if most <= ROWS_PER_READ:
        return most, most
    # A buffer for any routing has several times as many rows as arrive.
    usual = min(-(-num_rows // num_groups), -(-most // TURNS))
    return min(max(-(-usual // UNIT) * UNIT, ROWS_PER_READ), most), most


def batched_multiply(
    side: int,
    rows: Float[Array, "row inner"],
    weights: Float[Array, "group deep wide"],
    sizes: Int[Array, "group"],
    most: int | None = None,
) -> Float[Array, "row outer"]:
    """``rows[r] @ weights[g]``, with `side` 1 its transpose; zeros for rows of no group.

    Args:
      most: largest number of rows that a group can have; None is all of them.
    """
    num_rows, num_groups = rows.shape[0], sizes.shape[0]
    padded, most = padded_size(num_rows, num_groups, most)
    formula = ("gri,gio->gro", "gro,gio->gri")[side]
    start = jnp.cumsum(sizes) - sizes
    group = group_of_rows(sizes, num_rows)
    within = jnp.arange(num_rows, dtype=sizes.dtype) - take_rows(start, group)
    has_group = group < num_groups

    def turn(first: Array | int, out: Array | None) -> Array:
        at = _rows_of_turn(sizes, first, padded, num_rows)
        product = jnp.einsum(
            formula, take_rows(rows, at), weights, preferred_element_type=jnp.float32
        ).astype(rows.dtype)
        is_here = has_group & (within >= first) & (within < first + padded)
        slot = jnp.where(is_here, group * padded + within - first, num_groups * padded)
        result = take_rows(product.reshape(-1, product.shape[-1]), slot)
        return result if out is None else jnp.where(is_here[:, None], result, out)

    return _loop_over_groups(turn, sizes, padded, most)


def batched_sum(
    rows: Float[Array, "row inner"],
    others: Float[Array, "row outer"],
    sizes: Int[Array, "group"],
    most: int | None = None,
) -> Float[Array, "group inner outer"]:
    """Sum of ``rows[r]^T others[r]`` over the rows of each group, float32; `most` as in
    `batched_multiply`."""
    num_rows = rows.shape[0]
    padded, most = padded_size(num_rows, sizes.shape[0], most)

    def turn(first: Array | int, total: Array | None) -> Array:
        at = _rows_of_turn(sizes, first, padded, num_rows)
        product = jnp.einsum(
            "gri,gro->gio",
            take_rows(rows, at),
            take_rows(others, at),
            preferred_element_type=jnp.float32,
        )
        return product if total is None else total + product

    return _loop_over_groups(turn, sizes, padded, most)


def _rows_of_turn(sizes: Array, first: Array | int, padded: int, num_rows: int) -> Array:
    """``[group, position]`` rows of each group from its `first` one on; one past the last row where
    it has no more."""
    within = first + jnp.arange(padded, dtype=sizes.dtype)[None]
    start = (jnp.cumsum(sizes) - sizes)[:, None]
    return jnp.where(within < sizes[:, None], start + within, num_rows)


def _loop_over_groups(
    turn: Callable[[Any, Any], Array], sizes: Array, padded: int, most: int
) -> Array:
    """The first turn, and those that the largest group needs after it."""
    out = turn(0, None)
    if most <= padded:
        return out
    largest = jnp.max(sizes)

    def has_more(carry: tuple[Array, Array]) -> Bool[Array, ""]:
        return carry[0] < largest

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        first, out = carry
        return first + padded, turn(first, out)

    first = match_varying(jnp.asarray(padded, sizes.dtype), out)
    return lax.while_loop(has_more, step, (first, out))[1]


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """`a` times `b` over one dimension of each, summed and returned in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _cover_rows(
    tile: Callable[[Array, Array, int, Any], Any], start: Array, stop: Array, num_rows: int, out
):
    """`out` after ``tile(first, own, size, out)`` for tiles that cover rows `start` to `stop`.

    Each tile holds the rows from `first` on, of which `own` are its to treat: near the end of all
    rows it is moved up so as to stay within them, and at its own end it may run into the next
    group's rows.
    """
    heights = sorted({min(height, num_rows) for height in TILES}, reverse=True)
    # A tile is used while the next smaller one would need to be used as often as fills it.
    for height, smaller in pairwise([*heights, heights[-1]]):
        least = height - smaller if smaller < height else 0

        def step(carry, height=height):
            start, out = carry
            first = jnp.minimum(start, num_rows - height)
            row = first + jnp.arange(height, dtype=first.dtype)
            return start + height, tile(first, (row >= start) & (row < stop), height, out)

        def has_more(carry, least=least):
            return stop - carry[0] > least

        start, out = lax.while_loop(has_more, step, (start, out))
    return out


def _zeros(shape: tuple[int, ...], dtype, like: Array) -> Array:
    """Zeros typed as varying over the axes that `like` varies over."""
    return match_varying(jnp.zeros(shape, dtype), like)


def tiles_multiply(side, rows, weights, sizes):
    stop = jnp.cumsum(sizes)

    def multiply_group(group, out):
        matrix = lax.dynamic_index_in_dim(weights, group, keepdims=False)

        def tile(first, mask, height, out):
            product = _dot(lax.dynamic_slice_in_dim(rows, first, height), matrix, (1, side))
            before = lax.dynamic_slice_in_dim(out, first, height)
            after = jnp.where(mask[:, None], product.astype(out.dtype), before)
            return lax.dynamic_update_slice_in_dim(out, after, first, axis=0)

        return _cover_rows(tile, stop[group] - sizes[group], stop[group], rows.shape[0], out)

    out = _zeros((rows.shape[0], weights.shape[2 - side]), rows.dtype, rows)
    return lax.fori_loop(0, weights.shape[0], multiply_group, out)


def tiles_sum(rows, others, sizes):
    stop = jnp.cumsum(sizes)

    def sum_group(group):
        def tile(first, mask, height, out):
            # Both operands are masked: rows of other groups may hold NaN or infinity, and zero
            # times these is not zero.
            x, y = (
                jnp.where(mask[:, None], lax.dynamic_slice_in_dim(operand, first, height), 0)
                for operand in (rows, others)
            )
            return out + _dot(x, y, (0, 0))

        out = _zeros((rows.shape[1], others.shape[1]), jnp.float32, rows)
        return _cover_rows(tile, stop[group] - sizes[group], stop[group], rows.shape[0], out)

    return lax.map(sum_group, jnp.arange(sizes.shape[0]))


def block_size(num_rows: int, num_groups: int) -> int:
    """Rows per block: a power of two in 8..512 near half of the rows of an average group.

    Smaller blocks waste less padding. Larger ones read a matrix less often, and from about 300 rows
    on an accelerator multiplies for longer than it reads.
    """
    target = max(num_rows // (2 * num_groups), 1)
    return min(max(1 << (target.bit_length() - 1), 8), 512)


class Blocks(NamedTuple):
    """Layout of rows in which each group starts at a new block.

    Attributes:
      row: ``[block, position]`` index of the row in each slot; one past the last in an empty slot.
      slot: ``[row]`` index of the slot of each row over all blocks; one past the last for a row of
        no group.
      group: ``[block]`` group of each block.
    """

    row: Array
    slot: Array
    group: Array


def block_layout(sizes: Int[Array, "group"], num_rows: int) -> Blocks:
    """Block layout of rows that are sorted by group."""
    num_groups = sizes.shape[0]
    size = block_size(num_rows, num_groups)
    # Each group may leave one block unfilled: enough for any sizes, known when compiling.
    num_blocks = -(-num_rows // size) + num_groups
    start, blocks = jnp.cumsum(sizes) - sizes, -(-sizes // size)
    first = jnp.cumsum(blocks) - blocks
    # Blocks past the last row belong to the last group and hold none of its rows.
    group = positions_in(first, jnp.arange(num_blocks, dtype=first.dtype), "right") - 1
    within = (jnp.arange(num_blocks) - first[group])[:, None] * size + jnp.arange(size)[None]
    row = jnp.where(within < sizes[group, None], start[group, None] + within, num_rows)
    row_group = jnp.minimum(group_of_rows(sizes, num_rows), num_groups - 1)
    index = jnp.arange(num_rows)
    slot = jnp.where(
        index < jnp.sum(sizes),
        first[row_group] * size + index - start[row_group],
        num_blocks * size,
    )
    return Blocks(row, slot, group)


def blocks_multiply(side, rows, weights, sizes):
    blocks = block_layout(sizes, rows.shape[0])
    formula = ("ri,io->ro", "ro,io->ri")[side]

    def product(block):
        row, group = block
        # One matrix at a time: a batched product would need a copy of one for every block.
        matrix = lax.dynamic_index_in_dim(weights, group, keepdims=False)
        out = jnp.einsum(formula, take_rows(rows, row), matrix, preferred_element_type=jnp.float32)
        return out.astype(rows.dtype)

    out = lax.map(product, (blocks.row, blocks.group))
    return take_rows(out.reshape(-1, out.shape[-1]), blocks.slot)


def blocks_sum(rows, others, sizes):
    blocks = block_layout(sizes, rows.shape[0])

    def add(total, block):
        row, group = block
        x, y = take_rows(rows, row), take_rows(others, row)
        product = jnp.einsum("ri,ro->io", x, y, preferred_element_type=jnp.float32)
        # In place: what a loop carries is not copied.
        return total.at[group].add(product), None

    total = _zeros((sizes.shape[0], rows.shape[1], others.shape[1]), jnp.float32, rows)
    return lax.scan(add, total, (blocks.row, blocks.group))[0]


class Implementation(NamedTuple):
    """The two functions that compute a grouped GEMM and its gradients.

    Attributes:
      multiply_rows: ``(side, rows, weights, sizes)``, each row times the matrix of its group,
        contracted over dimension `side` of it: 0 is the product, 1 the one with the matrices
        transposed.
      sum_products: ``(rows [row inner], others [row outer], sizes, dtype) -> [group inner outer]``,
        the sum of ``rows[r]^T others[r]`` over the rows of a group in float32, rounded to `dtype`.
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


def mosaic_multiply(side, rows, weights, sizes):
    grouped.require_support(rows, weights.shape[2 - side])
    tiling = grouped.tiling_of(rows.shape[0], weights.shape[0])
    return grouped.multiply_rows(side, rows, weights, sizes, tiling=tiling)


def mosaic_sum(rows, others, sizes, dtype):
    grouped.require_support(rows, others.shape[1])
    return grouped.sum_products(rows, others, sizes, dtype=dtype)


def _rounded(total: Callable[..., Array]) -> Callable[..., Array]:
    """`Implementation.sum_products` of a function that returns float32."""
    return lambda rows, others, sizes, dtype: total(rows, others, sizes).astype(dtype)


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
    neither a result nor a gradient. Matrices are cast to the dtype of the rows at each use.
    Products are summed in float32, in the matrices' gradient over all rows of a group.

    Args:
      rows: sorted by group.
      weights: one matrix per group. The axes after the inner dimension are its columns in memory
        order; they are flattened at each use, and saved for the gradient as they are.
      sizes: number of rows of each group; none negative, in total at most the number of rows.
      implementation: "tiles", "blocks" and "batched" are plain JAX (`moe.experts.grouped_dot`);
        "mosaic" are kernels for NVIDIA's Hopper, for rows in half precision and dimensions that are
        multiples of 64; "plain" is the reference implementation, each row times each matrix. None
        is "tiles" on a CPU, "blocks" on a TPU and "batched" elsewhere.
      most: largest number of rows that a group can have, if it is less than all of them: "batched"
        needs no loop if it is small.

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
    grad_weights = product.sum_products(rows, grad_out, sizes, weights.dtype)
    return grad_rows, grad_weights.reshape(weights.shape), None


_grouped_dot.defvjp(_forward, _backward)


IMPLEMENTATIONS = {
    "tiles": Implementation(tiles_multiply, _rounded(tiles_sum)),
    "batched": Implementation(batched_multiply, _rounded(batched_sum)),
    "blocks": Implementation(blocks_multiply, _rounded(blocks_sum)),
    "mosaic": Implementation(mosaic_multiply, mosaic_sum),
    "plain": Implementation(plain_multiply, _rounded(plain_sum)),
}


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
        return Implementation(partial(_best_multiply, most), _rounded(partial(_best_sum, most)))
    if name == "batched":
        total = _rounded(partial(batched_sum, most=most))
        return Implementation(partial(batched_multiply, most=most), total)
    return IMPLEMENTATIONS[name]
