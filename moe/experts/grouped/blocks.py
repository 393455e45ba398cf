"""Grouped GEMM in a loop over blocks, with groups padded to whole blocks as in MegaBlocks
("blocks").

The number of blocks is static, so that a GPU runs the loop without a host synchronisation after
each.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moe.experts.grouped.groups import group_of_rows
from moe.ops.sorting import take_rows
from sharding.collectives import vary, varying


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


def blocks_of(sizes: Int[Array, "group"], num_rows: int) -> Blocks:
    """Block layout of rows that are sorted by group."""
    num_groups = sizes.shape[0]
    size = block_size(num_rows, num_groups)
    # Each group may leave one block unfilled: enough for any sizes, known when compiling.
    num_blocks = -(-num_rows // size) + num_groups
    start, blocks = jnp.cumsum(sizes) - sizes, -(-sizes // size)
    first = jnp.cumsum(blocks) - blocks
    # Blocks past the last row belong to the last group and hold none of its rows.
    group = jnp.searchsorted(first, jnp.arange(num_blocks, dtype=first.dtype), "right") - 1
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
    blocks = blocks_of(sizes, rows.shape[0])
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
    blocks = blocks_of(sizes, rows.shape[0])

    def add(total, block):
        row, group = block
        x, y = take_rows(rows, row), take_rows(others, row)
        product = jnp.einsum("ri,ro->io", x, y, preferred_element_type=jnp.float32)
        # In place: what a loop carries is not copied.
        return total.at[group].add(product), None

    total = jnp.zeros((sizes.shape[0], rows.shape[1], others.shape[1]), jnp.float32)
    total = vary(total, tuple(varying(rows)))
    return lax.scan(add, total, (blocks.row, blocks.group))[0]
