"""Grouped GEMM on Hopper's matrix units: rows times the matrix of their group, and its weight
gradient, the sum over a group's rows.

JAX ships reference kernels of both (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and
`transposed_ragged_dot_mgpu`). These follow them and differ where MoE needs it:

* The group of each tile is computed before the kernel, and not by every tile from a list of all
  groups, which is unrolled there; empty tiles are skipped.
* Rows of no group give zeros, and their contents reach no sum; there such rows stay unwritten and
  are multiplied by zero.
* Rows may be read through an index (gather), without a permuted copy, and written through one
  (scatter).
* Sums are returned in float32, and both kernels are lowered without a device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe.kernels.choice import foreign_gpus, unsupported_dtype
from moe.kernels.mosaic import Target, launch, mosaic_gpu
from moe.kernels.slices import RowSlices, multiply_slices, scatter_rows, with_slots


class Tiling(NamedTuple):
    """Tile sizes of a product.

    Attributes:
      rows, columns: size of the tile of the result that a program computes.
      depth: size of the slices along the contracted dimension, which are multiplied one by one.
      stages: number of slices in shared memory. With three, and the other defaults, two programs
        fit on a multiprocessor, of which one multiplies while the other writes.
      wide: number of tiles side by side that are computed before the next ones below.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    stages: int = 3
    wide: int = 8


TILING = Tiling()
UNIT = 64
"""Both dimensions of a matrix are multiples of this."""


def unsupported_size(size: int) -> str | None:
    """The rule for a dimension of a matrix, if this size breaks it."""
    return f"needs a multiple of {UNIT}" if size % UNIT or not size else None


def require_support(
    rows: Array | jax.ShapeDtypeStruct,
    width: int,
    name: str = "mosaic",
    operation: str = "grouped_dot",
) -> None:
    """Raises a ValueError with the reason and the fix if the kernels do not support these rows,
    this width of the result, or this process's GPUs."""
    reason = foreign_gpus(hopper_only=True) or unsupported_dtype("rows", rows.dtype)
    if reason is None and (unsupported_size(rows.shape[1]) or unsupported_size(width)):
        reason = f"matrices of {rows.shape[1]} x {width} (both must be multiples of {UNIT})"
    if reason is not None:
        raise ValueError(
            f'implementation="{name}" of {operation} does not support {reason}: use "blocks", or '
            "None for the best that applies."
        )


class Tiles(NamedTuple):
    """Tiles of rows, an entry each; there are more entries than tiles, the last without rows.

    Attributes:
      group: index of the group of the rows; one past the last for rows of no group.
      block: index of the block of rows that contains them.
      first: the first row of the tile within the block.
      size: number of rows; the others of the block belong to other groups.
    """

    group: Array
    block: Array
    first: Array
    size: Array


def plan_tiles(sizes: Int[Array, "group"], num_rows: int, height: int) -> Tiles:
    """Tiles of rows sorted by group: one for each pair of a block and a group with rows in it."""
    sizes = sizes.astype(jnp.int32)
    # Rows of no group are one more group, so that their results are written as zeros.
    sizes = jnp.append(sizes, num_rows - jnp.sum(sizes))
    stop = jnp.cumsum(sizes)
    start = stop - sizes
    count = jnp.where(sizes > 0, (stop - 1) // height - start // height + 1, 0)
    last = jnp.cumsum(count)
    # The number of tiles is known only at run time, and a grid is static: this is the most there
    # can be. Every block starts one tile, and every group that starts within a block one more.
    tile = jnp.arange(-(-num_rows // height) + sizes.shape[0] - 1, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= last[None, :], axis=1, dtype=jnp.int32)
    used = group < sizes.shape[0]
    group = jnp.minimum(group, sizes.shape[0] - 1)
    block = jnp.where(used, start[group] // height + tile - (last - count)[group], 0)
    first = jnp.maximum(start[group], block * height)
    size = jnp.minimum(stop[group], (block + 1) * height) - first
    return Tiles(group, block, first - block * height, jnp.where(used, size, 0))


def multiply_rows(
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
      source: index of the row of each slot, zeros where it is past the end; None is one slot per
        row. The kernel gathers the rows itself (`moe.kernels.slices`).
      destination: index of the row of the result that each slot is written to, no row where it is
        past the end; no two slots have the same. A row that no slot is written to is
        uninitialised. None is a result with the slots in their order.
      num_results: rows of the result where there is a destination; None is as many as slots.
    """
    width, height = weights.shape[2 - side], tiling.rows
    tiling = fit_columns(tiling, width)
    num_slots = (rows if source is None else source).shape[0]
    # `num_padded` is the number of slots with padding: at least one tile, so that no tile is
    # larger.
    row_sources, num_padded = pad_to_tiles(rows, source, height)
    tiles = plan_tiles(sizes, num_padded, height)
    down, across = tiles.group.shape[0], width // tiling.columns
    indices, num_rows = [], num_padded
    if destination is not None:
        num_rows = num_slots if num_results is None else num_results
        indices = [_pad_index(destination, num_padded, height, num_rows)]

    def body(target: Target, program, group, block, first, size, *refs):
        *row_refs, weights, out = refs
        destination_ref = row_refs.pop() if destination is not None else None
        # In panels of `wide` columns: programs in flight share rows and matrices in the L2 cache.
        tile, column = mosaic_gpu().planar_snake(
            program, (down, across), 1, min(tiling.wide, across)
        )

        @pl.when(size[tile] > 0)
        def _():
            # All rows of the block are multiplied, those of other groups too; only those of this
            # group are written, so that no mask is needed.
            (out_tile,) = product_tiles(
                target, side, row_refs, weights, tiling, group[tile], block[tile], [column]
            )
            start, rows_here = block[tile] * height, (first[tile], size[tile])
            if destination_ref is None:
                store_rows(out_tile, *rows_here, start, column, out)
            else:
                at = start, column * tiling.columns
                scatter_rows(target, out_tile, *rows_here, destination_ref, *at, out)

    (out,) = launch(
        body,
        down * across,
        [jax.ShapeDtypeStruct((num_rows, width), rows.dtype)],
        [*tiles, *row_sources, *indices, weights],
        operation="grouped_dot",
        name="grouped_product",
        simulated=simulated,
    )
    return out[:num_slots] if destination is None else out


def pad_to_tiles(rows: Array, source: Array | None, height: int) -> tuple[tuple[Array, ...], int]:
    """Arrays that a kernel reads the rows of a product from, and the number of rows with padding.

    With a `source` the rows are not copied; the index is padded instead.
    """
    if source is None:
        padded = pad_rows(rows, height)
        return (padded,), padded.shape[0]
    num_padded = max(height, -(-source.shape[0] // 8) * 8)
    return (rows, _pad_index(source, num_padded, height, rows.shape[0])), num_padded


def _pad_index(index: Array, num_padded: int, height: int, past: int) -> Array:
    """Pads an index to whole tiles, with entries past the end."""
    missing = -(-num_padded // height) * height - index.shape[0]
    return jnp.pad(index.astype(jnp.int32), (0, missing), constant_values=past)


def pad_rows(rows: Array, height: int) -> Array:
    """Pads rows to at least a tile and to a multiple of 8, the unit of the layout in shared memory:
    a tile must not be larger than the array it is copied from. Arrays that fit are not copied."""
    missing = max(height, -(-rows.shape[0] // 8) * 8) - rows.shape[0]
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows


def fit_columns(tiling: Tiling, width: int) -> Tiling:
    """Tile sizes for a result of this width."""
    return tiling._replace(columns=tile_width(width, tiling.columns))


def tile_width(dimension: int, most: int) -> int:
    """Largest tile width that divides a dimension, a multiple of 64 and at most `most`."""
    return next(width for width in range(most, 0, -64) if dimension % width == 0)


def product_tiles(
    target: Target,
    side: int,
    row_refs: Sequence[Any],
    weights: Any,
    tiling: Tiling,
    group: Any,
    block: Any,
    column_blocks: Sequence[Any],
) -> tuple[Array, ...]:
    """Tiles of the result in registers, float32, for the same rows; zeros for rows of no group.

    Args:
      row_refs: arrays of `pad_to_tiles`.
      tiling: of `fit_columns`.
      group, block: indices of the group and of the block of rows.
      column_blocks: index of the block of columns of each tile.
    """
    num_groups, depth = weights.shape[0], row_refs[0].shape[1]
    height, columns = tiling.rows, tiling.columns
    step, num_products = tile_width(depth, tiling.depth), len(column_blocks)

    # `totals` are references of the scope of `with_slots`: wgmma adds to them in place.
    def accumulate(slots, *totals):
        # Each slice of rows is loaded once for all tiles: gate and up share it (`swiglu`).
        def multiply(_, left, *matrices):
            for total, right in zip(totals, matrices, strict=True):
                mosaic_gpu().wgmma(total, left, target.transpose(right) if side else right)

        # `delay_release=1`: wgmma is asynchronous, so a slot is still being read for one step after
        # the product has started.
        def matrices_at(column):
            shape, index = (step, columns), lambda k: (k, column)
            if side:
                shape, index = (columns, step), lambda k: (column, k)
            return mosaic_gpu().BlockSpec(shape, index, delay_release=1)

        # The index is kept in bounds also in the branch that does not run.
        @pl.when(group < num_groups)
        def _():
            multiply_slices(
                target,
                multiply,
                depth // step,
                RowSlices(row_refs, slots, (height, step), lambda k: (block, k)),
                [*map(matrices_at, column_blocks)],
                [weights.at[jnp.minimum(group, num_groups - 1)]] * num_products,
                tiling.stages,
            )

        return tuple(total[...] for total in totals)

    accumulators = [mosaic_gpu().WGMMAAccumulatorRef((height, columns)) for _ in column_blocks]
    return with_slots(row_refs, (height, step), tiling.stages, accumulate, *accumulators)


def store_rows(tile, first, size, start, column, out):
    """Writes `size` rows of a tile from `first` on; the others belong to other groups."""
    height, columns = tile.shape

    # Through shared memory, from which the copy engine writes whole rows.
    def store(staged):
        staged[...] = tile.astype(out.dtype)
        mosaic_gpu().commit_smem()
        # The size of a copy is static: one copy for each power of two in the number of rows.
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


def sum_products(
    rows: Float[Array, "left inner"],
    others: Float[Array, "right outer"],
    sizes: Int[Array, "group"],
    *,
    source: Int[Array, "slot"] | None = None,
    gathered: int = 0,
    tiling: Tiling = TILING,
    simulated: bool = False,
) -> Float[Array, "group inner outer"]:
    """Sum of ``rows[r]^T others[r]`` over the rows of each group, float32.

    Args:
      source: index of the row of each slot, as in `multiply_rows`.
      gathered: the operand that `source` indexes: 0 is `rows`, 1 is `others`. The other one has a
        row for each slot.
    """
    num_groups, (inner, outer) = sizes.shape[0], (rows.shape[1], others.shape[1])
    step = tiling.depth
    # At most one operand is gathered: the other one is in the order of slots already.
    contiguous, indexed = (rows, others) if gathered else (others, rows)
    (row_sources, _), contiguous = pad_to_tiles(indexed, source, step), pad_rows(contiguous, step)
    stop = jnp.cumsum(sizes.astype(jnp.int32))
    start = stop - sizes.astype(jnp.int32)
    height, width = tile_width(inner, tiling.rows), tile_width(outer, tiling.columns)
    down, across = inner // height, outer // width

    def body(target: Target, program, start, stop, *refs):
        *row_refs, contiguous, out = refs
        # Programs of a group are neighbours: they read the same rows, which stay in the L2 cache.
        group = lax.div(program, jnp.int32(down * across))
        within = lax.rem(program, jnp.int32(down * across))
        i, j = mosaic_gpu().planar_snake(within, (down, across), 1, min(tiling.wide, across))
        # Whole blocks of `step` rows, as copies are aligned: the first and the last may contain
        # rows of neighbouring groups.
        first, last = start[group], stop[group]
        block = lax.div(first, jnp.int32(step))
        blocks = lax.div(last + step - 1, jnp.int32(step)) - block
        # From left and right to indexed and contiguous, or back.
        swap = slice(None, None, -1 if gathered else 1)
        indexed_axis, contiguous_axis = ((i, height), (j, width))[swap]
        shape = step, indexed_axis[1]

        def accumulate(slots, total):
            def multiply(k, *tiles):
                left, right = tiles[swap]
                at = (block + k) * step

                # Rows of other groups are set to zero in both operands: in one it is not enough,
                # as zero times NaN or infinity is not zero.
                @pl.when((at < first) | (at + step > last))
                def _():
                    for operand in (left, right):
                        zero_outside(target, operand, first - at, last - at)
                    mosaic_gpu().commit_smem()

                mosaic_gpu().wgmma(total, target.transpose(left), right)

            # A group without rows has a sum of zeros, which is still written.
            @pl.when(last > first)
            def _():
                indexed_rows = RowSlices(
                    row_refs, slots, shape, lambda k: (block + k, indexed_axis[0])
                )
                spec = mosaic_gpu().BlockSpec(
                    (step, contiguous_axis[1]),
                    lambda k: (block + k, contiguous_axis[0]),
                    delay_release=1,
                )
                multiply_slices(
                    target, multiply, blocks, indexed_rows, [spec], [contiguous], tiling.stages
                )

            return total[...]

        accumulator = mosaic_gpu().WGMMAAccumulatorRef((height, width))
        group_sum = with_slots(row_refs, shape, tiling.stages, accumulate, accumulator)

        def store(staged):
            staged[...] = group_sum
            mosaic_gpu().commit_smem()
            tile = group, pl.ds(i * height, height), pl.ds(j * width, width)
            mosaic_gpu().copy_smem_to_gmem(staged, out.at[tile])
            mosaic_gpu().wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(store, mosaic_gpu().SMEM((height, width), jnp.float32))

    return launch(
        body,
        num_groups * down * across,
        [jax.ShapeDtypeStruct((num_groups, inner, outer), jnp.float32)],
        [start, stop, *row_sources, contiguous],
        operation="grouped_dot",
        name="grouped_sum",
        simulated=simulated,
    )[0]


def zero_outside(target: Target, ref, first, last, axis: int = 0):
    """Sets the rows of a slice, or its columns, to zero before `first` and from `last` on."""
    inside = target.in_range(ref.shape, axis, first, last)
    zeros = target.tiled(jnp.zeros(ref.shape, ref.dtype))
    ref[...] = jnp.where(inside, target.tiled(ref[...]), zeros)
