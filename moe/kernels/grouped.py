"""Rows times the matrix of their group on Hopper's matrix units, and the sums over a group's rows.

JAX ships reference kernels of both (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and
`transposed_ragged_dot_mgpu`). These follow them and differ where a mixture of experts needs it:
which group a tile belongs to is worked out before the kernel and not by every tile from a list of
all groups, which is unrolled there; tiles of nothing are left out; rows of no group give zeros and
what they hold reaches no sum, where there rows stay unwritten and are multiplied by zero; rows may
be read through an index, where no copy of them is, and written through one; the sums are returned
in float32; and both are lowered without a device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe.kernels.mosaic import Target, launch, mosaic_gpu
from moe.kernels.slices import Rows, multiply_slices, scatter_rows, with_slots


class Tiling(NamedTuple):
    """How a product is cut.

    Attributes:
      rows, columns: of the tile of the result that a program computes.
      depth: of the slices that it multiplies at a time.
      stages: slices in shared memory at a time. Three of the others' defaults leave room for two
        programs on a multiprocessor, of which one multiplies while the other writes.
      wide: tiles side by side that are computed before the next ones below.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    stages: int = 3
    wide: int = 8


TILING = Tiling()


class Tiles(NamedTuple):
    """The tiles of rows, an entry each; more than there are, the last of no rows.

    Attributes:
      group: whose rows they are; one past the last for rows of no group.
      block: which block of so many rows they are in.
      first: the first of its own rows within the block.
      size: own rows; the others of the block are another group's.
    """

    group: Array
    block: Array
    first: Array
    size: Array


def tiles_of(sizes: Int[Array, "group"], num_rows: int, height: int) -> Tiles:
    """The tiles of rows sorted by group: a block for each group that has rows in it."""
    sizes = sizes.astype(jnp.int32)
    sizes = jnp.append(sizes, num_rows - jnp.sum(sizes))
    stop = jnp.cumsum(sizes)
    start = stop - sizes
    count = jnp.where(sizes > 0, (stop - 1) // height - start // height + 1, 0)
    last = jnp.cumsum(count)
    # Every block starts one tile, and every group that starts within a block one more.
    tile = jnp.arange(-(-num_rows // height) + sizes.shape[0] - 1, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= last[None, :], axis=1, dtype=jnp.int32)
    used = group < sizes.shape[0]
    group = jnp.minimum(group, sizes.shape[0] - 1)
    block = jnp.where(used, start[group] // height + tile - (last - count)[group], 0)
    first = jnp.maximum(start[group], block * height)
    size = jnp.minimum(stop[group], (block + 1) * height) - first
    return Tiles(group, block, first - block * height, jnp.where(used, size, 0))


def each(
    side: int,
    rows: Float[Array, "row inner"],
    weights: Float[Array, "group deep wide"],
    sizes: Int[Array, "group"],
    *,
    source: Int[Array, "slot"] | None = None,
    destination: Int[Array, "slot"] | None = None,
    num_results: int | None = None,
    tiling: Tiling = TILING,
    simulated: bool = False,
) -> Float[Array, "result outer"]:
    """``rows[r] @ weights[g]``, with `side` 1 its transpose; zeros for rows of no group.

    Args:
      source: the row in each slot, zeros where it is past the end; None is each row in a slot of
        its own. The product reads rows where they lie (`moe.kernels.slices`).
      destination: the row of the result that each slot is written to, no row where it is past the
        end; no two slots have the same. A row that no slot is written to holds anything. None is a
        result of the slots in their order.
      num_results: rows of the result where there is a destination; None is as many as slots.
    """
    width, height = weights.shape[2 - side], tiling.rows
    num_slots = (rows if source is None else source).shape[0]
    given, room = whole_tiles(rows, source, height)
    tiles = tiles_of(sizes, room, height)
    columns = fitting(width, tiling.columns)
    down, across = tiles.group.shape[0], width // columns
    indices, num_rows = [], room
    if destination is not None:
        num_rows = num_slots if num_results is None else num_results
        indices = [_to_whole_tiles(destination, room, height, num_rows)]

    def body(target: Target, program, group, block, first, size, *refs):
        *given, weights, out = refs
        into = given.pop() if destination is not None else None
        tile, column = mosaic_gpu().planar_snake(
            program, (down, across), 1, min(tiling.wide, across)
        )

        @pl.when(size[tile] > 0)
        def _():
            (found,) = product_tiles(
                target,
                side,
                (height, columns, tiling),
                (group[tile], block[tile], [column]),
                given,
                weights,
            )
            start = block[tile] * height
            if into is None:
                store_rows(found, first[tile], size[tile], start, column, out)
            else:
                own = first[tile], size[tile]
                scatter_rows(target, found, own, into, start, column * columns, out)

    (out,) = launch(
        body,
        down * across,
        [jax.ShapeDtypeStruct((num_rows, width), rows.dtype)],
        [*tiles, *given, *indices, weights],
        operation="grouped_dot",
        simulated=simulated,
    )
    return out[:num_slots] if destination is None else out


def whole_tiles(rows: Array, source: Array | None, height: int) -> tuple[tuple[Array, ...], int]:
    """What a kernel reads the rows of a product from, and how many these are with those that fill
    them up. With a `source` the rows stay as they are."""
    if source is None:
        padded = filled_up(rows, height)
        return (padded,), padded.shape[0]
    room = max(height, -(-source.shape[0] // 8) * 8)
    return (rows, _to_whole_tiles(source, room, height, rows.shape[0])), room


def _to_whole_tiles(index: Array, room: int, height: int, past: int) -> Array:
    """With an entry past the end for every slot that fills up a tile."""
    missing = -(-room // height) * height - index.shape[0]
    return jnp.pad(index.astype(jnp.int32), (0, missing), constant_values=past)


def filled_up(rows: Array, height: int) -> Array:
    """With as many rows as a tile and a multiple of 8, as they lie in shared memory: a copy of a
    tile is no larger than the array. Nothing is copied where there are."""
    missing = max(height, -(-rows.shape[0] // 8) * 8) - rows.shape[0]
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows


def fitting(dimension: int, most: int) -> int:
    """The width of tiles that divide a dimension, a multiple of 64."""
    return next(width for width in range(most, 0, -64) if dimension % width == 0)


def product_tiles(
    target: Target,
    side: int,
    shape: tuple[int, int, Tiling],
    at: Any,
    given: Sequence[Any],
    weights: Any,
) -> tuple[Array, ...]:
    """Tiles of the result in registers, float32, of the same rows; zeros where the group is none.

    Args:
      shape: of each tile, and how the product is cut.
      at: whose group's and which block of rows it is, and which blocks of columns.
      given: of `whole_tiles`.
    """
    (height, columns, tiling), (group, block, places) = shape, at
    num_groups, depth = weights.shape[0], given[0].shape[1]
    step, number = fitting(depth, tiling.depth), len(places)

    def accumulate(slots, *totals):
        def multiply(_, left, *matrices):
            for total, right in zip(totals, matrices, strict=True):
                mosaic_gpu().wgmma(total, left, target.transposed(right) if side else right)

        def matrices_at(column):
            if side:
                return mosaic_gpu().BlockSpec(
                    (columns, step), lambda k: (column, k), delay_release=1
                )
            return mosaic_gpu().BlockSpec((step, columns), lambda k: (k, column), delay_release=1)

        @pl.when(group < num_groups)
        def _():
            multiply_slices(
                target,
                multiply,
                depth // step,
                Rows(given, slots, (height, step), lambda k: (block, k)),
                [*map(matrices_at, places)],
                [weights.at[jnp.minimum(group, num_groups - 1)]] * number,
                tiling.stages,
            )

        return tuple(total[...] for total in totals)

    accumulators = [mosaic_gpu().WGMMAAccumulatorRef((height, columns)) for _ in places]
    return with_slots(given, (height, step), tiling.stages, accumulate, *accumulators)


def store_rows(tile, first, size, start, column, out):
    """Writes `size` rows of a tile from `first` on, and no others: they are another group's."""
    height, columns = tile.shape

    def store(staged):
        staged[...] = tile.astype(out.dtype)
        mosaic_gpu().commit_smem()
        # How many rows a copy moves is fixed: one copy for each power of two in their number.
        at = first
        for length in (1 << bit for bit in reversed(range(height.bit_length()))):

            @pl.when(size & length != 0)
            def _(at=at, length=length):
                mosaic_gpu().copy_smem_to_gmem(
                    staged.at[pl.ds(at, length)],
                    out.at[pl.ds(start + at, length), pl.ds(column * columns, columns)],
                )

            at += size & length
        mosaic_gpu().wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(store, mosaic_gpu().SMEM((height, columns), out.dtype))


def summed(
    rows: Float[Array, "left inner"],
    others: Float[Array, "right outer"],
    sizes: Int[Array, "group"],
    *,
    source: Int[Array, "slot"] | None = None,
    gathered: int = 0,
    tiling: Tiling = TILING,
    simulated: bool = False,
) -> Float[Array, "group inner outer"]:
    """The sum of ``rows[r]^T others[r]`` over the rows of each group, float32.

    Args:
      source: the row in each slot, as in `each`.
      gathered: whose row it is: 0 is of `rows`, 1 is of `others`. What is not gathered has a row in
        each slot.
    """
    num_groups, (inner, outer) = sizes.shape[0], (rows.shape[1], others.shape[1])
    step = tiling.depth
    neighbours, anywhere = (rows, others) if gathered else (others, rows)
    (given, _), neighbours = whole_tiles(anywhere, source, step), filled_up(neighbours, step)
    stop = jnp.cumsum(sizes.astype(jnp.int32))
    start = stop - sizes.astype(jnp.int32)
    height, width = fitting(inner, tiling.rows), fitting(outer, tiling.columns)
    down, across = inner // height, outer // width

    def body(target: Target, program, start, stop, *refs):
        *given, neighbours, out = refs
        group = lax.div(program, jnp.int32(down * across))
        within = lax.rem(program, jnp.int32(down * across))
        i, j = mosaic_gpu().planar_snake(within, (down, across), 1, min(tiling.wide, across))
        first, last = start[group], stop[group]
        block = lax.div(first, jnp.int32(step))
        blocks = lax.div(last + step - 1, jnp.int32(step)) - block
        sides = (i, height), (j, width)
        (far, far_width), (near, near_width) = sides[::-1] if gathered else sides

        def accumulate(slots, total):
            def multiply(k, from_anywhere, beside):
                left, right = (beside, from_anywhere) if gathered else (from_anywhere, beside)
                at = (block + k) * step

                # Rows of others are selected against: zero times what they hold need not be zero.
                @pl.when((at < first) | (at + step > last))
                def _():
                    for part in (left, right):
                        keep(target, part, first - at, last - at)
                    mosaic_gpu().commit_smem()

                mosaic_gpu().wgmma(total, target.transposed(left), right)

            @pl.when(last > first)
            def _():
                multiply_slices(
                    target,
                    multiply,
                    blocks,
                    Rows(given, slots, (step, far_width), lambda k: (block + k, far)),
                    [
                        mosaic_gpu().BlockSpec(
                            (step, near_width), lambda k: (block + k, near), delay_release=1
                        )
                    ],
                    [neighbours],
                    tiling.stages,
                )

            return total[...]

        found = with_slots(
            given,
            (step, far_width),
            tiling.stages,
            accumulate,
            mosaic_gpu().WGMMAAccumulatorRef((height, width)),
        )

        def store(staged):
            staged[...] = found
            mosaic_gpu().commit_smem()
            here = group, pl.ds(i * height, height), pl.ds(j * width, width)
            mosaic_gpu().copy_smem_to_gmem(staged, out.at[here])
            mosaic_gpu().wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(store, mosaic_gpu().SMEM((height, width), jnp.float32))

    return launch(
        body,
        num_groups * down * across,
        [jax.ShapeDtypeStruct((num_groups, inner, outer), jnp.float32)],
        [start, stop, *given, neighbours],
        operation="grouped_dot",
        simulated=simulated,
    )[0]


def keep(target: Target, part, first, last, axis: int = 0):
    """Zeros in the rows of a slice, or its columns, before `first` and from `last` on."""
    place = target.tiled(lax.broadcasted_iota(jnp.int32, part.shape, axis))
    kept = ((place >= first).astype(jnp.int32) * (place < last).astype(jnp.int32)) > 0
    nothing = target.tiled(jnp.zeros(part.shape, part.dtype))
    part[...] = jnp.where(kept, target.tiled(part[...]), nothing)
