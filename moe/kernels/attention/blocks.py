"""Block-sparse attention mask: the blocks of keys that a program visits, and the mask in a block.

The blocks to visit are computed before the kernels, from the ranges of mask fields (columns,
positions, segment ids): four numbers for each block. The mask of a block is computed in registers,
from two or three numbers per token, and only where the block is not known to be visible completely.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.kernels.mosaic import Target
from moe.ops.mask import TokenIndices, Window, is_fully_visible, may_be_visible

UNIT = 64
"""Tokens of a block, which a warpgroup multiplies at a time."""
MAX_BLOCK_TOKENS = 2 * UNIT
"""Tokens of the longest block of a program: rows are padded to a multiple."""
BASE_2 = math.log2(math.e)
"""Factor on scores whose exponentials are computed as powers of 2, by the GPU's ex2 instruction."""


def pad_to_blocks(x: Array, axis: int) -> Array:
    """Pads with zeros to a whole number of blocks; an array that has one is not copied."""
    missing = -x.shape[axis] % MAX_BLOCK_TOKENS
    return jnp.pad(x, [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)])


def pad_mask(mask: TokenIndices) -> TokenIndices:
    """Pads mask fields as `pad_to_blocks`: the added tokens have segment 0, so they count as
    padding."""
    return TokenIndices(*(pad_to_blocks(x, 1) for x in mask))


def block_mask(mask: TokenIndices, size: int) -> TokenIndices:
    """Reshapes ``[row, time]`` to ``[row, block, token]``."""
    return TokenIndices(*(x.reshape(x.shape[0], -1, size) for x in mask))


def in_blocks(
    x: Float[Array, "*heads time width"], size: int = UNIT
) -> Float[Array, "block token width"]:
    """Reshapes to the blocks of all heads, head after head."""
    return x.reshape(-1, size, x.shape[-1])


class VisitRange(NamedTuple):
    """Range of blocks that a program visits.

    Attributes:
      first, stop: the first, and one past the last, of the blocks with scores that may be visible.
      clear, clear_stop: range of consecutive blocks that are completely visible and need no mask.
    """

    first: Any
    stop: Any
    clear: Any
    clear_stop: Any

    @property
    def length(self) -> Any:
        return self.stop - self.first

    def is_clear(self, block: Any) -> Any:
        return (block >= self.clear) & (block < self.clear_stop)


def visit_table(
    query: TokenIndices, key: TokenIndices, window: Window, *, by_query: bool
) -> Int[Array, "row block bound"]:
    """Table of `VisitRange`: for each block of queries the blocks of keys, or for each block of
    keys the blocks of queries.

    Args:
      query, key: mask fields in blocks, as `block_mask` gives them.
    """

    def compare_pairs(meet: Callable[..., Array]) -> Array:
        over_key_blocks = jax.vmap(jax.vmap(meet, (None, 0)), (0, None))
        pairs = jax.vmap(over_key_blocks)(query, key)
        return pairs if by_query else jnp.swapaxes(pairs, 1, 2)

    # All pairs of blocks, but only their ranges: a few numbers for each pair, not each score.
    visible, fully_visible = (
        compare_pairs(partial(test, window=window)) for test in (may_be_visible, is_fully_visible)
    )
    block, end = lax.broadcasted_iota(jnp.int32, visible.shape, 2), visible.shape[2]
    stop = jnp.max(jnp.where(visible, block + 1, 0), axis=2)
    # If nothing is visible, the range is empty: `first` is then not past `stop`, 0.
    first = jnp.minimum(jnp.min(jnp.where(visible, block, end), axis=2), stop)
    # One range is enough: under a causal mask the completely visible blocks are consecutive. Any
    # further ones are masked: slower, with the same result.
    clear = jnp.min(jnp.where(fully_visible, block, end), axis=2)
    later = ~fully_visible & (block > clear[..., None])
    clear_stop = jnp.min(jnp.where(later, block, end), axis=2)
    return jnp.stack(VisitRange(first, stop, clear, clear_stop), axis=2)


def read_visits(table: Any, block: Any) -> VisitRange:
    """Reads the entry of a block, counted over all rows, from the flattened table of
    `visit_table`."""
    width = len(VisitRange._fields)
    return VisitRange(*(table[block * width + field] for field in range(width)))


def mask_operands(
    query: TokenIndices, key: TokenIndices, window: Window
) -> tuple[Int[Array, "block field token"], Int[Array, "key_block field key_token"]]:
    """Operands of `apply_mask` for the queries and for the keys of all rows: the column and the
    segment, and with a window the position.

    Args:
      query, key: mask fields in blocks, as `block_mask` gives them.
    """
    # Padding keys get segment -1, which no query has: one comparison hides them.
    query_fields = [query.column, query.segment]
    key_fields = [key.column, jnp.where(key.segment > 0, key.segment, -1)]
    if window is not None:
        # The window is subtracted here, once per token and not once per score.
        query_fields.append(query.position - window)
        key_fields.append(key.position)
    both = (jnp.stack(x, axis=2).astype(jnp.int32) for x in (query_fields, key_fields))
    query_fields, key_fields = (x.reshape(-1, *x.shape[2:]) for x in both)
    return query_fields, key_fields


def load_mask(target: Target, fields: Any, dimension: int) -> list[Array]:
    """Loads the mask fields of a block ``[field, token]`` into registers, in the layout of a
    dimension of a matrix of scores."""
    return [target.load(fields.at[field], dimension) for field in range(fields.shape[0])]


def apply_mask(
    target: Target,
    scores: Array,
    rows: list[Array],
    columns: Any,
    clear: Any,
    value: float,
    *,
    by_query: bool,
) -> Array:
    """Replaces the scores of hidden keys by `value`.

    Args:
      rows: mask fields of the tokens that are the rows of the matrix, `load_mask`.
      columns: mask fields of the tokens that are its columns, in memory.
      clear: true if the whole block is visible.
      by_query: queries are the rows; otherwise keys are.
    """

    def mask_scores(scores: Array) -> Array:
        # The columns' fields are loaded here, so that blocks that need no mask do not read them.
        fields = rows, load_mask(target, columns, 1)
        broadcast = [
            [target.broadcast(x, scores.shape, dimension) for x in vectors]
            for dimension, vectors in enumerate(fields)
        ]
        query, key = broadcast if by_query else reversed(broadcast)
        visible = (query[0] >= key[0]) & (query[1] == key[1])
        for oldest, position in zip(query[2:], key[2:], strict=True):
            visible &= oldest < position
        return jnp.where(visible, scores, target.full(scores.shape, value))

    # A branch and not a select: most blocks of long rows need no mask at all.
    return lax.cond(clear, lambda scores: scores, mask_scores, scores)
