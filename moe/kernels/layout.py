"""From the choices of tokens to rows in the order of experts, without a sort.

A histogram of each block of choices, the sums before each block and expert, and the rank of a
choice among those of its block: the place of a choice is the sum of the two. Comparisons of all
pairs within a block make the histogram and the ranks; no thread waits for another, and nothing is
added in an order that varies.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from moe.experts.permutation import inverse_slots, sort_by_group, take_rows
from moe.kernels.choice import by_name
from moe.kernels.mosaic import Target, launch

BLOCK = 128
"""Choices of one program."""
SIDE = 64
"""Rows and columns of the comparisons that a warpgroup makes at a time."""


class SortedLayout(NamedTuple):
    """Where choices stand when those of an expert stand together, each in the order of tokens.

    Attributes:
      choices: ``[slot]`` the choice in each slot, ``token * k + column``; one past the last where
        there is none.
      places: ``[token, k]`` the slot of each choice; one past the last for a choice of no expert
        and for one that found no slot.
      sizes: ``[expert]`` its choices, with a slot or without.
    """

    choices: Array
    places: Array
    sizes: Array

    @property
    def tokens(self) -> Array:
        """``[slot]`` the token in each slot; one past the last where there is none."""
        return self.choices // self.places.shape[1]


def slots_needed(num_choices: int, num_experts: int, tile: int = 1) -> int:
    """Slots in which any choices find theirs: each expert may leave one tile all but empty."""
    return -(-(num_choices + num_experts * (tile - 1)) // tile) * tile


def sorted_layout(
    experts: Int[Array, "token k"],
    num_experts: int,
    *,
    tile: int = 1,
    num_slots: int | None = None,
    implementation: str | None = None,
) -> SortedLayout:
    """The layout of choices sorted by expert, stable in the order of tokens.

    Args:
      experts: ids; any out of ``0..num_experts - 1`` is a choice of no expert and has no slot.
      tile: slots of an expert start at a multiple of this; those before the next one's are empty.
      num_slots: slots that there are; choices beyond have none. None is `slots_needed`.
      implementation: "mosaic", "plain" (a sort) or "interpreted", see `moe.kernels.choice`.

    Raises:
      ValueError: on another implementation, and on "mosaic" away from CUDA.
    """
    num_choices = experts.size
    if num_slots is None:
        num_slots = slots_needed(num_choices, num_experts, tile)
    ids = experts.reshape(-1).astype(jnp.int32)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    options = {"num_experts": num_experts, "tile": tile, "num_slots": num_slots}
    choices, places, sizes = by_name(
        implementation,
        partial(_plain, **options),
        partial(_kernel, **options),
        (ids,),
        operation="sorted_layout",
        obstacle=None if num_choices else "there are no choices; use None.",
    )
    return SortedLayout(choices, places.reshape(experts.shape), sizes)


def _plain(ids: Array, *, num_experts: int, tile: int, num_slots: int) -> tuple[Array, ...]:
    num_choices = ids.shape[0]
    order, sizes = sort_by_group(ids, num_experts)
    rank = inverse_slots(order, num_choices)
    if tile > 1:
        # Choices of no expert come last; what is read for them is not used.
        shift = _starts(sizes, tile) - _starts(sizes, 1)
        places = rank + take_rows(shift, ids)
        return *_with_choices(ids, places, num_experts, num_slots), sizes
    used = jnp.minimum(jnp.sum(sizes), num_slots)
    order = jnp.pad(order, (0, max(num_slots - num_choices, 0)))[:num_slots]
    choices = jnp.where(jnp.arange(num_slots) < used, order, num_choices)
    return choices, jnp.where(rank < used, rank, num_slots), sizes


def _with_choices(
    ids: Array, places: Array, num_experts: int, num_slots: int
) -> tuple[Array, Array]:
    """The choice in each slot and the places, those without a slot in the one past the last."""
    places = jnp.where(ids < num_experts, jnp.minimum(places, num_slots), num_slots)
    # No place is taken twice, so that this scatter needs no atomics.
    return inverse_slots(places, num_slots), places


def _starts(sizes: Array, tile: int) -> Array:
    padded = -(-sizes // tile) * tile
    return jnp.cumsum(padded) - padded


def _kernel(
    ids: Array, *, num_experts: int, tile: int, num_slots: int, interpreted: bool
) -> tuple[Array, ...]:
    num_choices = ids.shape[0]
    blocks, width = -(-num_choices // BLOCK), -(-num_experts // SIDE) * SIDE
    # What fills up a block, and choices of no expert, are equal to no column.
    filled = jnp.where(ids < num_experts, ids, width)
    filled = jnp.pad(filled, (0, blocks * BLOCK - num_choices), constant_values=width)
    run = partial(launch, operation="sorted_layout", interpreted=interpreted)
    counted = jax.ShapeDtypeStruct((blocks * width,), jnp.int32)
    (counts,) = run(partial(_count, width), blocks, [counted], [filled])
    counts = counts.reshape(blocks, width)
    sizes = jnp.sum(counts, axis=0)
    before = jnp.cumsum(counts, axis=0) - counts + _starts(sizes, tile)[None]
    placed = jax.ShapeDtypeStruct(filled.shape, jnp.int32)
    # The ids are an operand for each dimension that they are compared along: read twice from one,
    # they would be taken for one value, which cannot lie along both.
    operands = [filled, filled, before.reshape(-1)]
    (places,) = run(partial(_place, width), blocks, [placed], operands)
    return *_with_choices(ids, places[:num_choices], num_experts, num_slots), sizes[:num_experts]


def _spread(target: Target, vector: Array, dimension: int) -> Array:
    return target.tiled(lax.broadcast_in_dim(vector, (SIDE, SIDE), (dimension,)))


def _iota(target: Target, dimension: int) -> Array:
    return target.tiled(lax.broadcasted_iota(jnp.int32, (SIDE, SIDE), dimension))


def _count(width, target, block, ids, counts):
    """The choices of each expert (row) among those of a block (column)."""
    for first in range(0, width, SIDE):
        total = None
        for at in range(0, BLOCK, SIDE):
            chosen = _spread(target, target.load(ids.at[pl.ds(block * BLOCK + at, SIDE)], 1), 1)
            equal = (chosen == _iota(target, 0) + first).astype(jnp.int32)
            found = target.tiled(jnp.sum(equal, axis=1))
            total = found if total is None else total + found
        target.store(counts.at[pl.ds(block * width + first, SIDE)], total)


def _place(width, target, block, ids, others, before, places):
    """For each choice (row) those before it of the same expert (columns), and what the sums say of
    its expert (columns too)."""
    for at in range(0, BLOCK, SIDE):
        mine = _spread(target, target.load(ids.at[pl.ds(block * BLOCK + at, SIDE)], 0), 0)
        place = target.tiled(jnp.zeros((SIDE, SIDE), jnp.int32))
        for earlier in range(0, at + SIDE, SIDE):
            theirs = others.at[pl.ds(block * BLOCK + earlier, SIDE)]
            equal = (mine == _spread(target, target.load(theirs, 1), 1)).astype(jnp.int32)
            if earlier == at:
                equal *= (_iota(target, 1) < _iota(target, 0)).astype(jnp.int32)
            place = place + equal
        for first in range(0, width, SIDE):
            sums = target.load(before.at[pl.ds(block * width + first, SIDE)], 1)
            equal = (mine == _iota(target, 1) + first).astype(jnp.int32)
            place = place + _spread(target, sums, 1) * equal
        total = target.tiled(jnp.sum(place, axis=1))
        target.store(places.at[pl.ds(block * BLOCK + at, SIDE)], total)
