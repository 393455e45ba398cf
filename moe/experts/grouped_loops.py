"""Grouped GEMM in loops of plain JAX: "tiles" over groups and tiles of their rows, "blocks" over a
static number of blocks.

In "blocks" groups are padded to whole blocks, as in MegaBlocks. The number of blocks is static, so
that a GPU runs the loop without a host synchronisation after each.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe.ops.sorting import group_of_rows, positions_in, take_rows
from sharding.collectives import match_varying

TILES = (256, 32)
"""Rows of the tiles that cover a group in the loop of "tiles", larger ones first. Large tiles make
better products, small ones waste less on the end of a group and on short groups."""


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

    total = jnp.zeros((sizes.shape[0], rows.shape[1], others.shape[1]), jnp.float32)
    total = match_varying(total, rows)
    return lax.scan(add, total, (blocks.row, blocks.group))[0]
