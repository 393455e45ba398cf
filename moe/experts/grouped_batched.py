"""Grouped GEMM as a batched GEMM over the groups: few kernels, for GPUs.

Groups are padded to equal numbers of rows, so that one batched product multiplies every group by
its matrix. The matrices are read where they are, without a copy for each block of rows. Rows of a
group beyond its padded size are multiplied by further turns of a loop, as many as the largest group
needs: none if groups are balanced. In decoding, where a group has few rows at most, one turn is
enough for any routing, and reads each matrix once.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.ops.sorting import group_of_rows, take_rows
from sharding.collectives import match_varying

ROWS_PER_READ = 256
"""Rows that a matrix multiplies in about the time that it is read from an accelerator's memory: up
to as many, padding costs no time."""
TURNS = 8
"""Turns that a group of the largest size needs, at least."""
UNIT = 16
"""Padded groups are multiples of as many rows, as matrix units take them."""


def padded_size(num_rows: int, num_groups: int, most: int) -> int:
    """Rows of each group that one turn multiplies.

    Args:
      most: largest number of rows that a group can have.
    """
    if most <= ROWS_PER_READ:
        return most
    # A buffer for any routing has several times as many rows as arrive.
    usual = min(-(-num_rows // num_groups), -(-most // TURNS))
    return min(max(-(-usual // UNIT) * UNIT, ROWS_PER_READ), most)


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
    most = num_rows if most is None else min(most, num_rows)
    padded = padded_size(num_rows, num_groups, most)
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
    most = num_rows if most is None else min(most, num_rows)
    padded = padded_size(num_rows, sizes.shape[0], most)

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
