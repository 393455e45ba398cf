"""Grouped GEMM in dynamic loops over groups and over tiles of their rows ("tiles")."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from sharding.collectives import vary, varying

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
            at, out = carry
            first = jnp.minimum(at, num_rows - height)
            row = first + jnp.arange(height, dtype=first.dtype)
            return at + height, tile(first, (row >= at) & (row < stop), height, out)

        def has_more(carry, least=least):
            return stop - carry[0] > least

        start, out = lax.while_loop(has_more, step, (start, out))
    return out


def _zeros(shape: tuple[int, ...], dtype, like: Array) -> Array:
    """Zeros typed as varying over the axes that `like` varies over."""
    return vary(jnp.zeros(shape, dtype), tuple(varying(like)))


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
