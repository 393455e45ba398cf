"""Grouped GEMM on Hopper's matrix units: rows times the matrix of their group, and its weight
gradient, the sum over a group's rows.

JAX ships reference kernels of both (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and
`transposed_ragged_dot_mgpu`). These follow them and differ where MoE needs it:

* The group of each tile is computed before the kernel, and not by every tile from a list of all
  groups, which is unrolled there; empty tiles are skipped.
* Rows of no group give zeros, and their contents reach no sum; there such rows stay unwritten and
  are multiplied by zero.
* Sums are rounded once, from float32 to the requested dtype; both kernels can be lowered
  on a machine that has no GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float, Int

from moe.kernels.choice import foreign_gpus, unsupported_dtype
from moe.kernels.mosaic import Target, launch, mosaic_gpu


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
SMALL_TILING = Tiling(rows=64)
UNIT = 64
"""Both dimensions of a matrix are multiples of this."""


def unsupported_size(size: int) -> str | None:
    """The rule for a dimension of a matrix, if this size breaks it."""
    return f"needs a multiple of {UNIT}" if size % UNIT or not size else None


def require_support(rows: Array | jax.ShapeDtypeStruct, width: int) -> None:
    """Raises a ValueError with the reason and the fix if the kernels do not support these rows,
    this width of the result, or this process's GPUs."""
    reason = foreign_gpus(hopper_only=True) or unsupported_dtype("rows", rows.dtype)
    if reason is None and (unsupported_size(rows.shape[1]) or unsupported_size(width)):
        reason = f"matrices of {rows.shape[1]} x {width} (both must be multiples of {UNIT})"
    if reason is not None:
        raise ValueError(
            f'implementation="mosaic" of grouped_dot does not support {reason}: use "blocks", or '
            "None for the best that applies."
        )


def tiling_of(num_rows: int, num_groups: int) -> Tiling:
    """Tiling of a product: small tiles if groups have few rows, as in decoding. Of a larger tile
    most rows would belong to other groups, and three programs fit on a multiprocessor, not two."""
    return SMALL_TILING if num_rows <= SMALL_TILING.rows * num_groups else TILING


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
    tiling: Tiling = TILING,
    simulated: bool = False,
) -> Float[Array, "row outer"]:
    """``rows[r] @ weights[g]``, with `side` 1 its transpose; zeros for rows of no group."""
    num_rows, width, height = rows.shape[0], weights.shape[2 - side], tiling.rows
    tiling = tiling._replace(columns=tile_width(width, tiling.columns))
    rows = pad_rows(rows, height)
    tiles = plan_tiles(sizes, rows.shape[0], height)
    down, across = tiles.group.shape[0], width // tiling.columns

    def body(target: Target, program, group, block, first, size, rows, weights, out):
        # In panels of `wide` columns: programs in flight share rows and matrices in the L2 cache.
        tile, column = mosaic_gpu().planar_snake(
            program, (down, across), 1, min(tiling.wide, across)
        )

        @pl.when(size[tile] > 0)
        def _():
            # All rows of the block are multiplied, also the rows of other groups; only the rows of
            # this group are written, so that no mask is needed.
            out_tile = product_tile(
                target, side, rows, weights, tiling, group[tile], block[tile], column
            )
            store_rows(out_tile, first[tile], size[tile], block[tile] * height, column, out)

    (out,) = launch(
        body,
        down * across,
        [jax.ShapeDtypeStruct((rows.shape[0], width), rows.dtype)],
        [*tiles, rows, weights],
        operation="grouped_dot",
        name="grouped_product",
        simulated=simulated,
    )
    return out[:num_rows]


def pad_rows(rows: Array, height: int) -> Array:
    """Pads rows to at least a tile and to a multiple of 8, the unit of the layout in shared memory:
    a tile must not be larger than the array it is copied from. Arrays that fit are not copied."""
    missing = max(height, -(-rows.shape[0] // 8) * 8) - rows.shape[0]
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows


def tile_width(dimension: int, most: int) -> int:
    """Largest tile width that divides a dimension, a multiple of 64 and at most `most`."""
    return next(width for width in range(most, 0, -64) if dimension % width == 0)


def product_tile(
    target: Target,
    side: int,
    rows: Any,
    weights: Any,
    tiling: Tiling,
    group: Any,
    block: Any,
    column: Any,
) -> Array:
    """A tile of the result in registers, float32; zeros for rows of no group.

    Args:
      tiling: Tile sizes, with columns that divide the width of the result.
      group, block, column: Indices of the group and of the blocks of rows and of columns.
    """
    num_groups, depth = weights.shape[0], rows.shape[1]
    height, columns = tiling.rows, tiling.columns
    step = tile_width(depth, tiling.depth)
    matrix_slice = (step, columns), lambda k: (k, column)
    if side:
        matrix_slice = (columns, step), lambda k: (column, k)

    # `total` is a reference: wgmma adds to it in place.
    def accumulate(total):
        def multiply(_, left, right):
            mosaic_gpu().wgmma(total, left, target.transpose(right) if side else right)

        # The index is kept in bounds also in the branch that does not run.
        @pl.when(group < num_groups)
        def _():
            multiply_slices(
                multiply,
                depth // step,
                [((height, step), lambda k: (block, k)), matrix_slice],
                [rows, weights.at[jnp.minimum(group, num_groups - 1)]],
                tiling.stages,
            )

        return total[...]

    return pl.run_scoped(accumulate, mosaic_gpu().WGMMAAccumulatorRef((height, columns)))


def multiply_slices(
    multiply: Callable[[Any, Any, Any], None],
    num_slices: Any,
    slices: Sequence[tuple[tuple[int, int], Callable[[Any], Any]]],
    operands: Sequence[Any],
    stages: int,
) -> None:
    """Runs ``multiply(k, left, right)`` for each slice k, with loads of later slices in flight.

    Args:
      multiply: Starts an asynchronous product (wgmma).
      slices: Shape of the slices of each operand, and block index of slice k.
      operands: Arrays that slices are copied from.
      stages: Number of slices in shared memory.
    """

    def step(indices, left, right):
        multiply(indices[0], left, right)
        # The product of the step before has finished: its slot is refilled next. The product of
        # this step is still running while the next slice is awaited.
        mosaic_gpu().wgmma_wait(1)

    # `delay_release=1`: a slot is still being read for one step after the product has started.
    specs = [mosaic_gpu().BlockSpec(*of_operand, delay_release=1) for of_operand in slices]
    run_steps = mosaic_gpu().emit_pipeline(
        step, grid=(num_slices,), in_specs=specs, max_concurrent_steps=stages
    )
    run_steps(*operands)


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
    rows: Float[Array, "row inner"],
    others: Float[Array, "row outer"],
    sizes: Int[Array, "group"],
    *,
    dtype: DTypeLike = jnp.float32,
    tiling: Tiling = TILING,
    simulated: bool = False,
) -> Float[Array, "group inner outer"]:
    """Sum of ``rows[r]^T others[r]`` over the rows of each group, in float32, then in `dtype`."""
    num_groups, (inner, outer) = sizes.shape[0], (rows.shape[1], others.shape[1])
    step = tiling.depth
    stop = jnp.cumsum(sizes.astype(jnp.int32))
    start = stop - sizes.astype(jnp.int32)
    height, width = tile_width(inner, tiling.rows), tile_width(outer, tiling.columns)
    down, across = inner // height, outer // width

    def body(target: Target, program, start, stop, rows, others, out):
        # Programs of a group are neighbours: they read the same rows, which stay in the L2 cache.
        group = lax.div(program, jnp.int32(down * across))
        within = lax.rem(program, jnp.int32(down * across))
        i, j = mosaic_gpu().planar_snake(within, (down, across), 1, min(tiling.wide, across))
        # Whole blocks of `step` rows, as copies are aligned: the first and the last may contain
        # rows of neighbouring groups.
        first, last = start[group], stop[group]
        block = lax.div(first, jnp.int32(step))
        blocks = lax.div(last + step - 1, jnp.int32(step)) - block
        slices = [
            ((step, height), lambda k: (block + k, i)),
            ((step, width), lambda k: (block + k, j)),
        ]

        def accumulate(total):
            def multiply(k, left, right):
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
                multiply_slices(multiply, blocks, slices, [rows, others], tiling.stages)

            return total[...]

        accumulator = mosaic_gpu().WGMMAAccumulatorRef((height, width))
        group_sum = pl.run_scoped(accumulate, accumulator)

        def store(staged):
            staged[...] = group_sum.astype(dtype)
            mosaic_gpu().commit_smem()
            tile = group, pl.ds(i * height, height), pl.ds(j * width, width)
            mosaic_gpu().copy_smem_to_gmem(staged, out.at[tile])
            mosaic_gpu().wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(store, mosaic_gpu().SMEM((height, width), dtype))

    return launch(
        body,
        num_groups * down * across,
        [jax.ShapeDtypeStruct((num_groups, inner, outer), dtype)],
        [start, stop, pad_rows(rows, step), pad_rows(others, step)],
        operation="grouped_dot",
        name="grouped_sum",
        simulated=simulated,
    )[0]


def zero_outside(target: Target, ref, first, last, axis: int = 0):
    """Sets the rows of a slice, or its columns, to zero before `first` and from `last` on."""
    inside = target.in_range(ref.shape, axis, first, last)
    zeros = target.tiled(jnp.zeros(ref.shape, ref.dtype))
    ref[...] = jnp.where(inside, target.tiled(ref[...]), zeros)
