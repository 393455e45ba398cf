"""Which blocks of queries and keys meet, and the mask within a block.

What a program has to visit is worked out before the kernels, from the ranges of marks: four numbers
for each block. The mask of a block is made in registers, of two or three numbers per token, where
it is not known to be visible whole.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.attention.mask import Marks, Window, all_meet, may_meet
from moe.kernels.mosaic import Target

UNIT = 64
"""Tokens of a block, which a warpgroup multiplies at a time."""
LONGEST = 2 * UNIT
"""Tokens of the longest block of a program: rows are filled up to a multiple."""
BASE_2 = math.log2(math.e)
"""What scores are multiplied by where powers are of two: for these a GPU has an instruction."""


def filled_up(x: Array, axis: int) -> Array:
    """With zeros up to a whole number of blocks; nothing is copied where there is one."""
    missing = -x.shape[axis] % LONGEST
    return jnp.pad(x, [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)])


def filled_marks(marks: Marks) -> Marks:
    """Those of padding where `filled_up` adds something."""
    return Marks(*(filled_up(x, 1) for x in marks))


def cut(marks: Marks, size: int) -> Marks:
    """``[row, time]`` to ``[row, block, token]``."""
    return Marks(*(x.reshape(x.shape[0], -1, size) for x in marks))


def in_blocks(
    x: Float[Array, "*heads time width"], size: int = UNIT
) -> Float[Array, "block token width"]:
    """The blocks of all heads, one head's after the other's."""
    return x.reshape(-1, size, x.shape[-1])


class Visited(NamedTuple):
    """The blocks that a program visits.

    Attributes:
      first, stop: the first, and one past the last, of those that any may meet.
      clear, clear_stop: of those that are visible whole, one after the other.
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
    query: Marks, key: Marks, window: Window, *, by_query: bool
) -> Int[Array, "row block bound"]:
    """`Visited`: for each block of queries those of keys, or for each of keys those of queries.

    Args:
      query, key: blocks, of `cut`.
    """

    def of_pairs(meet: Callable[..., Array]) -> Array:
        of_blocks = jax.vmap(jax.vmap(meet, (None, 0)), (0, None))
        found = jax.vmap(of_blocks)(query, key)
        return found if by_query else jnp.swapaxes(found, 1, 2)

    met, whole = (of_pairs(partial(test, window=window)) for test in (may_meet, all_meet))
    block, end = lax.broadcasted_iota(jnp.int32, met.shape, 2), met.shape[2]
    stop = jnp.max(jnp.where(met, block + 1, 0), axis=2)
    first = jnp.minimum(jnp.min(jnp.where(met, block, end), axis=2), stop)
    clear = jnp.min(jnp.where(whole, block, end), axis=2)
    later = ~whole & (block > clear[..., None])
    clear_stop = jnp.min(jnp.where(later, block, end), axis=2)
    return jnp.stack(Visited(first, stop, clear, clear_stop), axis=2)


def visited(table: Any, block: Any) -> Visited:
    """What a program finds in `bounds`, flat, of a block of all rows."""
    width = len(Visited._fields)
    return Visited(*(table[block * width + number] for number in range(width)))


def marked(
    query: Marks, key: Marks, window: Window
) -> tuple[Int[Array, "block mark token"], Int[Array, "key_block mark key_token"]]:
    """What `masked` compares, of the queries and of the keys of all rows: the column and the
    segment, and with a window the position.

    Args:
      query, key: blocks, of `cut`.
    """
    # No query is of the segment of keys that nobody sees.
    of_query = [query.column, query.segment]
    of_key = [key.column, jnp.where(key.segment > 0, key.segment, -1)]
    if window is not None:
        of_query.append(query.position - window)
        of_key.append(key.position)
    both = (jnp.stack(x, axis=2).astype(jnp.int32) for x in (of_query, of_key))
    of_query, of_key = (x.reshape(-1, *x.shape[2:]) for x in both)
    return of_query, of_key


def loaded(target: Target, marks: Any, dimension: int) -> list[Array]:
    """Those of a block ``[mark, token]``, along a dimension of a matrix of scores."""
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
    """Scores with `value` where a query does not see a key.

    Args:
      rows: marks of those that are rows of the matrix, `loaded`.
      columns: those of its columns, in memory.
      clear: whether all is visible.
      by_query: whether queries are the rows.
    """

    def compared(scores: Array) -> Array:
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

    return lax.cond(clear, lambda scores: scores, compared, scores)


def spread(target: Target, vector: Array, shape: tuple[int, ...], dimension: int) -> Array:
    """A number for each row of a matrix, or for each column."""
    return target.tiled(lax.broadcast_in_dim(vector, shape, (dimension,)))


def full(target: Target, shape: tuple[int, ...], value: float) -> Array:
    return target.tiled(jnp.full(shape, value, jnp.float32))
