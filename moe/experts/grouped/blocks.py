"""Groups padded to whole blocks, one batched product over blocks, as in MegaBlocks ("blocks")."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moe.experts.grouped.groups import group_of_rows


def block_size(num_rows: int, num_groups: int) -> int:
    """Rows per block: a power of two in 8..256 near a quarter of the rows of an average group.

    Smaller blocks waste less padding, larger ones make better products.
    """
    target = max(num_rows // (4 * num_groups), 1)
    return min(max(1 << (target.bit_length() - 1), 8), 256)


class Blocks(NamedTuple):
    """Where rows stand when each group starts at a block.

    Attributes:
      row: ``[block, position]`` the row in each slot; one past the last where there is none.
      slot: ``[row]`` the slot of each row over all blocks; one past the last for a row of none.
      group: ``[block]`` the group of each block.
    """

    row: Array
    slot: Array
    group: Array


def blocks_of(sizes: Int[Array, "group"], num_rows: int) -> Blocks:
    """The blocks of rows sorted by group."""
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
    of_row = jnp.minimum(group_of_rows(sizes, num_rows), num_groups - 1)
    index = jnp.arange(num_rows)
    slot = jnp.where(
        index < jnp.sum(sizes), first[of_row] * size + index - start[of_row], num_blocks * size
    )
    return Blocks(row, slot, group)


def _in_blocks(x: Array, blocks: Blocks) -> Array:
    return x.at[blocks.row].get(mode="fill", fill_value=0)


def blocks_each(side, rows, weights, sizes):
    blocks = blocks_of(sizes, rows.shape[0])
    formula = ("bri,bio->bro", "bro,bio->bri")[side]
    out = jnp.einsum(
        formula,
        _in_blocks(rows, blocks),
        weights[blocks.group],
        preferred_element_type=jnp.float32,
    ).astype(rows.dtype)
    return out.reshape(-1, out.shape[-1]).at[blocks.slot].get(mode="fill", fill_value=0)


def blocks_summed(rows, others, sizes):
    blocks = blocks_of(sizes, rows.shape[0])
    x, y = _in_blocks(rows, blocks), _in_blocks(others, blocks)
    products = jnp.einsum("bri,bro->bio", x, y, preferred_element_type=jnp.float32)
    return jax.ops.segment_sum(products, blocks.group, sizes.shape[0], indices_are_sorted=True)
