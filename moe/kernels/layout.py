"""Layout of tokens permuted by expert id, computed by a counting sort in blocks.

An assignment is one of the k expert ids of a token. The slot of an assignment is the number of
assignments of its expert in earlier blocks, with all assignments of earlier experts, plus its rank
in its own block. Histograms and ranks come from comparing all pairs within a block; no thread waits
for another, and nothing is added in an order that varies.

The forward pass of "permute" is the backward pass of "unpermute", and the reverse. Neither
scatters.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from moe.kernels.choice import call_implementation
from moe.kernels.mosaic import launch
from moe.ops.sorting import inverse_slots, sort_by_group

BLOCK = 128
"""Assignments of one program."""
SIDE = 64
TILE = SIDE, SIDE
"""Rows and columns of the matrix of comparisons that a warpgroup has in registers."""


class SortedLayout(NamedTuple):
    """Layout of assignments sorted by expert, and for each expert by token.

    Attributes:
      assignments: ``[slot]`` index of the assignment in each slot, ``token * k + column``; one past
        the last in an empty slot.
      slots: ``[token, k]`` the slot of each assignment; one past the last if it has no expert
        or no slot.
      sizes: ``[expert]`` number of assignments, with a slot or without.
    """

    assignments: Array
    slots: Array
    sizes: Array

    @property
    def tokens(self) -> Array:
        """``[slot]`` index of the token in each slot; one past the last in an empty slot."""
        return self.assignments // self.slots.shape[1]

    @property
    def stops(self) -> Array:
        """``[expert]`` one past the last slot of each expert."""
        return jnp.minimum(jnp.cumsum(self.sizes), self.assignments.size)


def sorted_layout(
    experts: Int[Array, "token k"],
    num_experts: int,
    *,
    num_slots: int | None = None,
    implementation: str | None = None,
) -> SortedLayout:
    """Computes the layout of assignments sorted by expert, stable in the order of tokens.

    Args:
      experts: expert ids; one that is not in ``0..num_experts - 1`` has no slot.
      num_slots: number of slots; assignments beyond them have none. None is one for each.
      implementation: "mosaic", "plain" (a sort) or "interpreted", see `moe.kernels.choice`.

    Raises:
      ValueError: on another implementation, and on "mosaic" on other devices than CUDA's.
    """
    num_assignments = experts.size
    num_slots = num_assignments if num_slots is None else num_slots
    ids = experts.reshape(-1).astype(jnp.int32)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    options = {"num_experts": num_experts, "num_slots": num_slots}
    assignments, slots, sizes = call_implementation(
        implementation,
        partial(_plain, **options),
        partial(_kernel, **options),
        (ids,),
        operation="sorted_layout",
        obstacle=None if num_assignments else "there are no expert ids; use None.",
    )
    return SortedLayout(assignments, slots.reshape(experts.shape), sizes)


def _plain(ids: Array, *, num_experts: int, num_slots: int) -> tuple[Array, ...]:
    num_assignments = ids.shape[0]
    order, sizes = sort_by_group(ids, num_experts)
    rank = inverse_slots(order, num_assignments)
    used = jnp.minimum(jnp.sum(sizes), num_slots)
    order = jnp.pad(order, (0, max(num_slots - num_assignments, 0)))[:num_slots]
    assignments = jnp.where(jnp.arange(num_slots) < used, order, num_assignments)
    return assignments, jnp.where(rank < used, rank, num_slots), sizes


def _kernel(
    ids: Array, *, num_experts: int, num_slots: int, interpreted: bool
) -> tuple[Array, ...]:
    num_assignments = ids.shape[0]
    blocks, width = -(-num_assignments // BLOCK), -(-num_experts // SIDE) * SIDE
    # The padding of a block, and assignments to no expert, get an id that equals no column.
    padded_ids = jnp.where(ids < num_experts, ids, width)
    padded_ids = jnp.pad(padded_ids, (0, blocks * BLOCK - num_assignments), constant_values=width)
    run = partial(launch, operation="sorted_layout", interpreted=interpreted)
    shape = jax.ShapeDtypeStruct((blocks * width,), jnp.int32)
    (counts,) = run(partial(_count, width), blocks, [shape], [padded_ids], name="count_assignments")
    counts = counts.reshape(blocks, width)
    # Exclusive sums: the first slot of each expert, plus its assignments in the blocks before.
    sizes = jnp.sum(counts, axis=0)
    before = jnp.cumsum(counts, axis=0) - counts + (jnp.cumsum(sizes) - sizes)[None]
    # The ids are two operands, one for each dimension that they are compared along. Two loads of
    # one operand would be merged into one value, which cannot have both register layouts.
    operands = [padded_ids, padded_ids, before.reshape(-1)]
    shape = jax.ShapeDtypeStruct(padded_ids.shape, jnp.int32)
    body = partial(_assign_slots, width)
    (slots,) = run(body, blocks, [shape], operands, name="place_assignments")
    slots = jnp.minimum(slots[:num_assignments], num_slots)
    slots = jnp.where(ids < num_experts, slots, num_slots)
    # No slot is used twice, so this scatter needs no atomics.
    return inverse_slots(slots, num_slots), slots, sizes[:num_experts]


def _count(width, target, block, ids, counts):
    """Kernel of the histogram: compares experts (rows) with the assignments of a block (columns)
    and sums along rows."""
    # In registers, without shared counters: atomics on these would contend for popular experts.
    for first in range(0, width, SIDE):
        total = None
        for offset in range(0, BLOCK, SIDE):
            expert = target.load(ids.at[pl.ds(block * BLOCK + offset, SIDE)], 1)
            expert = target.broadcast(expert, TILE, 1)
            equal = (expert == target.iota(TILE, 0) + first).astype(jnp.int32)
            block_counts = target.tiled(jnp.sum(equal, axis=1))
            total = block_counts if total is None else total + block_counts
        target.store(counts.at[pl.ds(block * width + first, SIDE)], total)


def _assign_slots(width, target, block, ids, others, before, slots):
    """Kernel of the slots: for each assignment (row) it counts earlier ones of the same expert in
    the block (columns) and adds the first slot of its expert and block, selected by a comparison
    with all experts (columns)."""
    for offset in range(0, BLOCK, SIDE):
        row_ids = target.load(ids.at[pl.ds(block * BLOCK + offset, SIDE)], 0)
        row_ids = target.broadcast(row_ids, TILE)
        slot = target.tiled(jnp.zeros(TILE, jnp.int32))
        for earlier in range(0, offset + SIDE, SIDE):
            column_ids = target.load(others.at[pl.ds(block * BLOCK + earlier, SIDE)], 1)
            equal = (row_ids == target.broadcast(column_ids, TILE, 1)).astype(jnp.int32)
            # In its own tile only those below the diagonal come earlier.
            if earlier == offset:
                equal *= (target.iota(TILE, 1) < target.iota(TILE, 0)).astype(jnp.int32)
            slot = slot + equal
        # A gather by expert id, written as compare and sum: registers cannot be indexed.
        for first in range(0, width, SIDE):
            sums = target.load(before.at[pl.ds(block * width + first, SIDE)], 1)
            equal = (row_ids == target.iota(TILE, 1) + first).astype(jnp.int32)
            slot = slot + target.broadcast(sums, TILE, 1) * equal
        total = target.tiled(jnp.sum(slot, axis=1))
        target.store(slots.at[pl.ds(block * BLOCK + offset, SIDE)], total)
