"""Loads of a product's rows into shared memory, slice by slice, contiguous or gathered by an index;
and scattered stores of its result.

Contiguous rows are copied by Hopper's copy engine (TMA). One that gathers rows comes with
Blackwell, and one TMA copy per row of a slice would be 128 of them, 128 bytes each. Instead each
thread copies 16 bytes at a time to their position in the swizzled tile of the matrix units
(``cp.async``, as before Hopper): eight threads per row, for any index, while earlier slices are
multiplied. Pallas has no such copy, and Mosaic GPU's takes no indices, so the instruction is
emitted here. Scattered rows of a result are also stored 16 bytes at a time by each thread;
contiguous ones are left to the copy engine.

References:
  Guo et al., "SonicMoE", 2025 (rows are gathered by ``cp.async`` in the loads of a grouped product,
  and its stores do not scatter). https://arxiv.org/abs/2512.14080
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moe.kernels.mosaic import LANES, Gpu, Target, mosaic_gpu

SWIZZLE_COLUMNS = 64
"""Columns of a swizzled tile of 16-bit elements: 128 bytes."""
ATOM = 8
"""Rows after which the swizzle repeats, and elements that a thread copies at a time."""


class RowSlices(NamedTuple):
    """Source of the rows of a product.

    Attributes:
      refs: an array of rows and, if they are gathered, the index of the row to copy for each row
        of the product; past the end for rows of zeros.
      slots: shared memory of `with_slots`.
      shape: shape of a slice.
      block: block index of slice k, as in a `BlockSpec`.
    """

    refs: Sequence[Any]
    slots: Sequence[Any]
    shape: tuple[int, int]
    block: Callable[[Any], tuple[Any, Any]]


def with_slots(
    refs: Sequence[Any],
    shape: tuple[int, int],
    stages: int,
    body: Callable[..., Any],
    *accumulators: Any,
) -> Any:
    """Runs ``body(slots, *accumulators)`` with shared memory for gathered slices; the pipeline of
    contiguous ones allocates its own."""
    if len(refs) == 1:
        return pl.run_scoped(partial(body, []), *accumulators)
    # One more than the stages of a pipeline: a slot is refilled two slices after it was read.
    memory = mosaic_gpu().SMEM((stages + 1, *shape), refs[0].dtype)
    return pl.run_scoped(lambda slots: pl.run_scoped(partial(body, [slots]), *accumulators), memory)


def multiply_slices(
    target: Target,
    multiply: Callable[..., None],
    steps: Any,
    rows: RowSlices,
    specs: Sequence[Any],
    others: Sequence[Any],
    stages: int,
) -> None:
    """Runs ``multiply(k, rows, *others)`` for each slice k, with loads in flight.

    Args:
      multiply: starts an asynchronous product for each of `others`.
      steps: number of slices.
      specs: the `BlockSpec` of each of `others`.
      stages: number of slices in shared memory.
    """
    products = len(others)

    def multiply_contiguous(indices, left, *tiles):
        multiply(indices[0], left, *tiles)
        # The products of the step before have finished: its slot is refilled next. Those of this
        # step are still running while the next slice is awaited.
        mosaic_gpu().wgmma_wait(products)

    def run(step, specs, operands):
        run_steps = mosaic_gpu().emit_pipeline(
            step, grid=(steps,), in_specs=specs, max_concurrent_steps=stages
        )
        run_steps(*operands)

    if not rows.slots:
        spec = mosaic_gpu().BlockSpec(rows.shape, rows.block, delay_release=1)
        return run(multiply_contiguous, [spec, *specs], [*rows.refs, *others])

    pipeline = GatherPipeline(target, rows, rows.slots[0], steps)

    def multiply_gathered(indices, *tiles):
        # The next copies are started after the product, so that the threads issue them while the
        # matrix units work.
        multiply(indices[0], pipeline.tile(indices[0]), *tiles)
        pipeline.start_next(indices[0])
        mosaic_gpu().wgmma_wait(products)

    pipeline.start()
    return run(multiply_gathered, [*specs], others)


class GatherPipeline(NamedTuple):
    """Pipeline of gathered slices: copies of later ones are in flight while one is multiplied.

    Attributes:
      target: the machine that the program runs on.
      rows: gathered rows of 16-bit elements, their number a multiple of `SWIZZLE_COLUMNS`.
      slots: tiles in shared memory, three or more.
      num_slices: number of slices.
    """

    target: Target
    rows: RowSlices
    slots: Any
    num_slices: Any

    @property
    def slices_in_flight(self) -> int:
        """Number of slices in flight: all slots but two. One of these is being multiplied; the
        other was before, and a slow warp may not have seen the end of that product yet."""
        return self.slots.shape[0] - 2

    def start(self) -> None:
        for k in range(self.slices_in_flight):
            self._start(jnp.int32(k))

    def tile(self, k: jax.Array) -> Any:
        """Waits until all warps have copied their chunks of slice k, and returns its tile."""
        # A thread waits for its own copies only. The fence makes them visible to the matrix units,
        # and its barrier makes all threads of the warpgroup wait for each other.
        if isinstance(self.target, Gpu):
            wait_for_copies(self.slices_in_flight - 1)
        mosaic_gpu().commit_smem()
        return self._slot(k)

    def start_next(self, k: jax.Array) -> None:
        """Starts to copy slice ``k + slices_in_flight`` to the slot of slice k - 2. Every warp must
        have seen the end of that product before `tile` of slice k."""
        self._start(k + self.slices_in_flight)

    def _slot(self, k: jax.Array) -> Any:
        return self.slots.at[lax.rem(k, jnp.int32(self.slots.shape[0]))]

    def _start(self, k: jax.Array) -> None:
        @pl.when(k < self.num_slices)
        def _():
            # From block indices to element offsets, which the copies of single rows need.
            indices = zip(self.rows.block(k), self.rows.shape, strict=True)
            first, column = (index * size for index, size in indices)
            copy, (x, source) = copy_rows, self.rows.refs
            if isinstance(self.target, Gpu):
                copy = start_copies
            copy(x, source, first, column, self._slot(k))

        if isinstance(self.target, Gpu):
            # Also without a copy, after the last slice: waits count groups, so every step has one.
            close_group()


def copy_rows(x: Any, source: Any, first: Any, column: Any, tile: Any) -> None:
    """Equivalent of `start_copies` for interpreters, row by row."""
    height, width = tile.shape

    def copy(row, _):
        index = source[first + row]
        values = x[jnp.clip(index, 0, x.shape[0] - 1), pl.ds(column, width)]
        tile[row] = jnp.where((index >= 0) & (index < x.shape[0]), values, jnp.zeros_like(values))

    lax.fori_loop(0, height, copy, None)


def chunks_of_thread(thread: Any, height: int, width: int) -> list[tuple[Any, Any, Any]]:
    """Chunks of a tile ``[height, width]`` that a thread copies: the row and the first column of
    each 16 bytes, and the offset in shared memory, in elements.

    The tile is stored as the matrix units read it with a swizzle of 128 bytes: blocks of 8 rows and
    64 columns, row by row, and in row r of a block the eighth c at index ``c xor r``.

    Args:
      thread: index in the warpgroup; an integer or anything with integer arithmetic.
    """
    # Neighbouring threads have neighbouring eighths of a row, so that loads of it coalesce.
    across = width // ATOM
    rows_per_step = LANES // across
    eighth, first = thread % across, thread // across
    chunks = []
    for start in range(0, height, rows_per_step):
        row = first + start
        block = (row // ATOM) * (width // SWIZZLE_COLUMNS) + eighth // ATOM
        within = (row % ATOM) * SWIZZLE_COLUMNS + ((eighth % ATOM) ^ (row % ATOM)) * ATOM
        chunks.append((row, eighth * ATOM, block * (ATOM * SWIZZLE_COLUMNS) + within))
    return chunks


def start_copies(x: Any, source: Any, first: Any, column: Any, tile: Any) -> None:
    """Starts to copy ``x[source[first + r], column + c]`` to ``tile[r, c]``, zeros where the index
    is past the end.

    Args:
      x: rows of 16-bit elements, their number a multiple of `SWIZZLE_COLUMNS`.
      tile: in shared memory, ``[8 m, 64 n]``, read by the matrix units only.
    """
    plgpu = mosaic_gpu()
    scalar_type = plgpu.Layout.WG_SPLAT
    height, width = tile.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), scalar_type, scalar_type, _swizzled())
    )
    def copy(context, x, source, first, column, tile):
        from jax.experimental.mosaic.gpu import FragmentedArray, utils
        from jax.experimental.mosaic.gpu.utils import arith, ir, llvm, nvvm

        short, long = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        kind = ir.MemRefType(x.type)
        rows, stride = kind.shape
        indices, shared = utils.memref_ptr(source), utils.memref_ptr(tile)
        elements = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(x))
        bytes_copied, zero = utils.c(2 * ATOM, short), utils.c(0, short)
        thread = FragmentedArray.splat(utils.thread_idx(), (), is_signed=False) % LANES
        for row, column_offset, shared_offset in chunks_of_thread(thread, height, width):
            index = utils.getelementptr(indices, [as_value(first + row)], short)
            index = llvm.load(short, index)
            # Unsigned: a negative index counts as past the end too.
            inside = arith.cmpi(arith.CmpIPredicate.ult, index, utils.c(rows, short))
            # In 64 bits, as a large array has more elements than 32 bits count.
            safe = arith.extui(long, arith.select(inside, index, zero))
            start = arith.muli(safe, utils.c(stride, long))
            start = arith.addi(start, arith.extui(long, as_value(column + column_offset)))
            # A copy of size 0 writes zeros: rows past the end need no branch and no store.
            nvvm.cp_async_shared_global(
                utils.getelementptr(shared, [as_value(shared_offset)], kind.element_type),
                utils.getelementptr(elements, [start], kind.element_type),
                2 * ATOM,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=arith.select(inside, bytes_copied, zero),
            )

    def as_value(scalar):
        return scalar.registers.item()

    copy(x, source, first, column, tile)


def _swizzled() -> Any:
    plgpu = mosaic_gpu()
    tiling = plgpu.TilingTransform((ATOM, SWIZZLE_COLUMNS))
    return plgpu.RefType((tiling, plgpu.SwizzleTransform(2 * SWIZZLE_COLUMNS)))


def close_group() -> None:
    """Commits this thread's copies since the last call as a group (``cp.async.commit_group``)."""
    _emit(lambda nvvm: nvvm.cp_async_commit_group())


def wait_for_copies(pending: int) -> None:
    """Waits for this thread's copies, except those of the last `pending` groups
    (``cp.async.wait_group``)."""
    _emit(lambda nvvm: nvvm.cp_async_wait_group(pending))


def _emit(instruction: Callable[[Any], None]) -> None:
    @mosaic_gpu().inline_mgpu()
    def emit(context):
        from jax.experimental.mosaic.gpu.utils import nvvm

        instruction(nvvm)

    emit()


def scatter_rows(
    target: Target,
    tile: Any,
    first: Any,
    size: Any,
    destination: Any,
    start: Any,
    column: Any,
    out: Any,
) -> None:
    """Writes ``tile[r]`` to ``out[destination[start + r], column:]`` for some rows r of a tile,
    where that index is not past the end.

    Args:
      tile: in registers, with a multiple of `ATOM` rows, and 64 or 128 columns.
      first, size: the first of the rows and their number; the others belong to other groups.
    """

    # Through shared memory: in registers a thread has scattered pieces of 8 bytes or less, while 16
    # bytes of a row are stored by one instruction.
    def store(staged):
        staged[...] = tile.astype(out.dtype)
        mosaic_gpu().commit_smem()
        write = scatter_chunks if isinstance(target, Gpu) else write_rows
        write(staged, first, size, destination, start, column, out)

    pl.run_scoped(store, mosaic_gpu().SMEM(tile.shape, out.dtype))


def write_rows(
    staged: Any, first: Any, size: Any, destination: Any, start: Any, column: Any, out: Any
):
    """Equivalent of `scatter_chunks` for interpreters, row by row."""

    def write(row, _):
        index = destination[start + row]

        @pl.when((index >= 0) & (index < out.shape[0]))
        def _():
            out[index, pl.ds(column, staged.shape[1])] = staged[row]

    lax.fori_loop(first, first + size, write, None)


def scatter_chunks(
    staged: Any, first: Any, size: Any, destination: Any, start: Any, column: Any, out: Any
):
    """Stores ``staged[r, c]`` to ``out[destination[start + r], column + c]`` for `size` rows from
    `first` on, 16 bytes at a time; nothing where the index is past the end.

    Args:
      staged: in shared memory, ``[8 m, 64 n]`` of 16-bit elements, which every warp has written.
    """
    plgpu = mosaic_gpu()
    scalar_type, (height, width) = plgpu.Layout.WG_SPLAT, staged.shape
    scalars, ref = [scalar_type] * 2, plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(_swizzled(), *scalars, ref, *scalars, ref))
    def copy(context, staged, first, size, destination, start, column, out):
        from jax.experimental.mosaic.gpu import FragmentedArray, utils
        from jax.experimental.mosaic.gpu.utils import arith, ir, llvm

        short, long = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        four = ir.VectorType.get((4,), short)
        below = arith.CmpIPredicate.ult
        kind = ir.MemRefType(out.type)
        rows, stride = kind.shape
        indices, shared = utils.memref_ptr(destination), utils.memref_ptr(staged)
        elements = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(out))
        thread = FragmentedArray.splat(utils.thread_idx(), (), is_signed=False) % LANES
        chunks = []
        # All loads before all stores, so that they are in flight together.
        for row, column_offset, shared_offset in chunks_of_thread(thread, height, width):
            index = utils.getelementptr(indices, [as_value(start + row)], short)
            index = llvm.load(short, index)
            inside = arith.cmpi(below, index, utils.c(rows, short))
            # Unsigned again: first <= row < first + size in one comparison.
            in_range = arith.cmpi(below, arith.subi(as_value(row), as_value(first)), as_value(size))
            address = utils.getelementptr(shared, [as_value(shared_offset)], kind.element_type)
            values = llvm.load(four, address, alignment=2 * ATOM)
            chunks.append(
                (arith.andi(inside, in_range), index, as_value(column + column_offset), values)
            )
        for is_stored, index, column_offset, values in chunks:
            begin = arith.muli(arith.extui(long, index), utils.c(stride, long))
            begin = arith.addi(begin, arith.extui(long, column_offset))
            address = utils.getelementptr(elements, [begin], kind.element_type)
            with utils.when(is_stored):
                llvm.store(values, address, alignment=2 * ATOM)

    def as_value(scalar):
        return scalar.registers.item()

    copy(staged, first, size, destination, start, column, out)
