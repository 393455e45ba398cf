"""Block-sparse attention mask: the blocks of keys that a program visits, and the mask in a block.

The blocks to visit are computed before the kernels, from the ranges of marks (columns, positions,
segment ids): four numbers for each block. The mask of a block is computed in registers, from two or
three numbers per token, and only where the block is not known to be visible completely.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.attention.mask import TokenIndices, Window, is_fully_visible, may_be_visible
from moe.kernels.mosaic import Target

UNIT = 64
"""Tokens of a block, which a warpgroup multiplies at a time."""
LONGEST = 2 * UNIT
"""Tokens of the longest block of a program: rows are padded to a multiple."""
BASE_2 = math.log2(math.e)
"""Factor on scores whose exponentials are computed as powers of 2, by the GPU's ex2 instruction."""


def filled_up(x: Array, axis: int) -> Array:
    """Pads with zeros to a whole number of blocks; an array that has one is not copied."""
    missing = -x.shape[axis] % LONGEST
    return jnp.pad(x, [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)])


def filled_marks(marks: TokenIndices) -> TokenIndices:
    """Pads marks as `filled_up`: the added tokens have segment 0, so they count as padding."""
    return TokenIndices(*(filled_up(x, 1) for x in marks))


def cut(marks: TokenIndices, size: int) -> TokenIndices:
    """Reshapes ``[row, time]`` to ``[row, block, token]``."""
    return TokenIndices(*(x.reshape(x.shape[0], -1, size) for x in marks))


def in_blocks(
    x: Float[Array, "*heads time width"], size: int = UNIT
) -> Float[Array, "block token width"]:
    """Reshapes to the blocks of all heads, head after head."""
    return x.reshape(-1, size, x.shape[-1])


class Visited(NamedTuple):
    """Range of blocks that a program visits.

    Attributes:
      first, stop: the first, and one past the last, of the blocks with scores that may be visible.
      clear, clear_stop: range of consecutive blocks that are visible completely, without a mask.
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


def bounds(
    query: TokenIndices, key: TokenIndices, window: Window, *, by_query: bool
) -> Int[Array, "row block bound"]:
    """Table of `Visited`: for each block of queries the blocks of keys, or for each block of keys
    those of queries.

    Args:
      query, key: marks in blocks, as `cut` gives them.
    """

    def of_pairs(meet: Callable[..., Array]) -> Array:
        of_blocks = jax.vmap(jax.vmap(meet, (None, 0)), (0, None))
        found = jax.vmap(of_blocks)(query, key)
        return found if by_query else jnp.swapaxes(found, 1, 2)

    # All pairs of blocks, but only their ranges: a few numbers for each pair, not each score.
    met, whole = (
        of_pairs(partial(test, window=window)) for test in (may_be_visible, is_fully_visible)
    )
    block, end = lax.broadcasted_iota(jnp.int32, met.shape, 2), met.shape[2]
    stop = jnp.max(jnp.where(met, block + 1, 0), axis=2)
    # An empty range where nothing is visible: `first` is then not past `stop`, which is 0.
    first = jnp.minimum(jnp.min(jnp.where(met, block, end), axis=2), stop)
    # One range is enough: under a causal mask the blocks without a hidden score are consecutive.
    # Any further ones are masked, which is slower and gives the same.
    clear = jnp.min(jnp.where(whole, block, end), axis=2)
    later = ~whole & (block > clear[..., None])
    clear_stop = jnp.min(jnp.where(later, block, end), axis=2)
    return jnp.stack(Visited(first, stop, clear, clear_stop), axis=2)


def visited(table: Any, block: Any) -> Visited:
    """Reads the entry of a block, counted over all rows, from the flattened table of `bounds`."""
    width = len(Visited._fields)
    return Visited(*(table[block * width + number] for number in range(width)))


def marked(
    query: TokenIndices, key: TokenIndices, window: Window
) -> tuple[Int[Array, "block mark token"], Int[Array, "key_block mark key_token"]]:
    """Operands of `masked` for the queries and for the keys of all rows: the column and the
    segment, and with a window the position.

    Args:
      query, key: marks in blocks, as `cut` gives them.
    """
    # Padding keys get segment -1, which no query has: one comparison hides them.
    of_query = [query.column, query.segment]
    of_key = [key.column, jnp.where(key.segment > 0, key.segment, -1)]
    if window is not None:
        # The window is subtracted here, once per token and not once per score.
        of_query.append(query.position - window)
        of_key.append(key.position)
    both = (jnp.stack(x, axis=2).astype(jnp.int32) for x in (of_query, of_key))
    of_query, of_key = (x.reshape(-1, *x.shape[2:]) for x in both)
    return of_query, of_key


def loaded(target: Target, marks: Any, dimension: int) -> list[Array]:
    """Loads the marks of a block ``[mark, token]`` into registers, in the layout of a dimension of
    a matrix of scores."""
    return [target.load(marks.at[number], dimension) for number in range(marks.shape[0])]


def masked(
    target: Target,
    scores: Array,
    rows: list[Array],
    columns: Any,
    clear: Any,
    value: float,
    *,
    by_query: bool,
) -> Array:
    """Scores, with `value` where a query does not see a key.

    Args:
      rows: marks of the tokens that are the rows of the matrix, `loaded`.
      columns: marks of the tokens that are its columns, in memory.
      clear: true if the whole block is visible.
      by_query: queries are the rows; otherwise keys are.
    """

    def compared(scores: Array) -> Array:
        # The columns' marks are loaded here, so that blocks without a mask do not read them.
        marks = rows, loaded(target, columns, 1)
        spread_out = [
            [spread(target, x, scores.shape, dimension) for x in of_side]
            for dimension, of_side in enumerate(marks)
        ]
        query, key = spread_out if by_query else reversed(spread_out)
        visible = (query[0] >= key[0]) & (query[1] == key[1])
        for oldest, position in zip(query[2:], key[2:], strict=True):
            visible &= oldest < position
        return jnp.where(visible, scores, full(target, scores.shape, value))

    # A branch and not a select: most blocks of long rows need no mask at all.
    return lax.cond(clear, lambda scores: scores, compared, scores)


def spread(target: Target, vector: Array, shape: tuple[int, ...], dimension: int) -> Array:
    """Broadcasts a number for each row of a matrix, or for each column, to the matrix."""
    return target.tiled(lax.broadcast_in_dim(vector, shape, (dimension,)))


def full(target: Target, shape: tuple[int, ...], value: float) -> Array:
    return target.tiled(jnp.full(shape, value, jnp.float32))
