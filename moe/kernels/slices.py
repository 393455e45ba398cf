"""The rows of a product, slice by slice into shared memory: neighbours, or rows from anywhere; and
rows of its result to anywhere.

Neighbours are copied by Hopper's copy engine. One that gathers rows comes with Blackwell, and a
copy of it for every row of a slice would be 128 of them, 128 bytes each. Instead each thread copies
16 bytes at a time to where the swizzle of the matrix units' tile has them (``cp.async``, as before
Hopper): eight threads a row, of whichever index, while slices before are multiplied. Pallas has no
such copy, and Mosaic GPU's takes no indices: the instruction is stated here. Rows of a result are
stored so too, 16 bytes at a time by each thread, where neighbours are left to the copy engine.

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

WIDE = 64
"""Columns of a swizzled tile, numbers of 16 bits: 128 bytes."""
ATOM = 8
"""Rows after which the swizzle repeats itself, and numbers that a thread copies at a time."""


class Rows(NamedTuple):
    """Where the rows of a product come from.

    Attributes:
      given: an array of rows and, where these are gathered, of which of them each row is a copy;
        past the end for rows of zeros.
      slots: of `with_slots`.
      shape: of a slice.
      block: that slice k is, as of a `BlockSpec`.
    """

    given: Sequence[Any]
    slots: Sequence[Any]
    shape: tuple[int, int]
    block: Callable[[Any], tuple[Any, Any]]


def with_slots(
    given: Sequence[Any],
    shape: tuple[int, int],
    stages: int,
    body: Callable[..., Any],
    *accumulators: Any,
) -> Any:
    """``body(slots, *accumulators)``, with room in shared memory for slices of rows that are
    gathered; copies of neighbours bring their own."""
    if len(given) == 1:
        return pl.run_scoped(partial(body, []), *accumulators)
    # One more than others have on their way: a slot is filled two slices after it was read.
    room = mosaic_gpu().SMEM((stages + 1, *shape), given[0].dtype)
    return pl.run_scoped(lambda slots: pl.run_scoped(partial(body, [slots]), *accumulators), room)


def multiply_slices(
    target: Target,
    multiply: Callable[..., None],
    steps: Any,
    rows: Rows,
    specs: Sequence[Any],
    others: Sequence[Any],
    stages: int,
) -> None:
    """``multiply(k, rows, *others)`` for slice k of each of `steps`.

    Args:
      multiply: begins a product for each of `others`, and leaves it on its way.
      specs: the `BlockSpec` of each of `others`.
      stages: slices in shared memory at a time.
    """
    products = len(others)

    def neighbours(indices, left, *tiles):
        multiply(indices[0], left, *tiles)
        # What the step before reads is over: its slot is the next to be filled.
        mosaic_gpu().wgmma_wait(products)

    def run(step, specs, operands):
        pipeline = mosaic_gpu().emit_pipeline(
            step, grid=(steps,), in_specs=specs, max_concurrent_steps=stages
        )
        pipeline(*operands)

    if not rows.slots:
        spec = mosaic_gpu().BlockSpec(rows.shape, rows.block, delay_release=1)
        return run(neighbours, [spec, *specs], [*rows.given, *others])

    def place(k):
        return tuple(at * size for at, size in zip(rows.block(k), rows.shape, strict=True))

    (x, source), (slots,) = rows.given, rows.slots
    gathered = Gathered(target, x, source, slots, place, steps)

    def from_anywhere(indices, *tiles):
        multiply(indices[0], gathered.tile(indices[0]), *tiles)
        gathered.go_on(indices[0])
        mosaic_gpu().wgmma_wait(products)

    gathered.begin()
    return run(from_anywhere, [*specs], others)


class Gathered(NamedTuple):
    """Slices of rows from anywhere, some of them on their way while one is multiplied.

    Attributes:
      target: what the program runs on.
      x: rows of 16-bit numbers, of a multiple of `WIDE`.
      source: of which of them each row of the product is a copy; past the end for zeros.
      slots: tiles in shared memory, three or more.
      place: the first entry of `source` and the first column of slice k.
      number: of slices.
    """

    target: Target
    x: Any
    source: Any
    slots: Any
    place: Callable[[Any], tuple[Any, Any]]
    number: Any

    @property
    def ahead(self) -> int:
        """Slices on their way: of two more, one is read by the matrix units and the other was, by
        some warp perhaps still."""
        return self.slots.shape[0] - 2

    def begin(self) -> None:
        for k in range(self.ahead):
            self._start(jnp.int32(k))

    def tile(self, k: jax.Array) -> Any:
        """Slice k where the matrix units read it, once every warp's part of it is there."""
        if isinstance(self.target, Gpu):
            wait_for_copies(self.ahead - 1)
        mosaic_gpu().commit_smem()
        return self._slot(k)

    def go_on(self, k: jax.Array) -> None:
        """Begins another slice, where k - 2 was: before `tile` of slice k every warp must have seen
        that one multiplied."""
        self._start(k + self.ahead)

    def _slot(self, k: jax.Array) -> Any:
        return self.slots.at[lax.rem(k, jnp.int32(self.slots.shape[0]))]

    def _start(self, k: jax.Array) -> None:
        @pl.when(k < self.number)
        def _():
            first, column = self.place(k)
            copy = start_copies if isinstance(self.target, Gpu) else copy_rows
            copy(self.x, self.source, first, column, self._slot(k))

        if isinstance(self.target, Gpu):
            # Empty where there are no more slices: which group is awaited goes by their number.
            close_group()


def copy_rows(x: Any, source: Any, first: Any, column: Any, tile: Any) -> None:
    """What `start_copies` does, row by row, for an interpreter."""
    height, width = tile.shape

    def copy(row, _):
        index = source[first + row]
        piece = x[jnp.clip(index, 0, x.shape[0] - 1), pl.ds(column, width)]
        tile[row] = jnp.where((index >= 0) & (index < x.shape[0]), piece, jnp.zeros_like(piece))

    lax.fori_loop(0, height, copy, None)


def places(thread: Any, height: int, width: int) -> list[tuple[Any, Any, Any]]:
    """What a thread copies of a tile ``[height, width]``: the row and the first column of each 16
    bytes, and the number in shared memory that they begin at.

    The tile lies there as the matrix units want it with a swizzle of 128 bytes: blocks of 8 rows
    and 64 columns, row by row, and in row r of a block the eighth c in place ``c xor r``.

    Args:
      thread: of a warpgroup; a number or anything that counts as one does.
    """
    across = width // ATOM
    together = LANES // across
    eighth, first = thread % across, thread // across
    found = []
    for start in range(0, height, together):
        row = first + start
        block = (row // ATOM) * (width // WIDE) + eighth // ATOM
        within = (row % ATOM) * WIDE + ((eighth % ATOM) ^ (row % ATOM)) * ATOM
        found.append((row, eighth * ATOM, block * (ATOM * WIDE) + within))
    return found


def start_copies(x: Any, source: Any, first: Any, column: Any, tile: Any) -> None:
    """Begins to copy ``x[source[first + r], column + c]`` to ``tile[r, c]``, zeros where the index
    is past the end.

    Args:
      x: rows of 16-bit numbers, of a multiple of `WIDE`.
      tile: in shared memory, ``[8 m, 64 n]``, which the matrix units read and nothing else does.
    """
    plgpu = mosaic_gpu()
    number = plgpu.Layout.WG_SPLAT
    height, width = tile.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), number, number, _swizzled()))
    def copy(context, x, source, first, column, tile):
        from jax.experimental.mosaic.gpu import FragmentedArray, utils
        from jax.experimental.mosaic.gpu.utils import arith, ir, llvm, nvvm

        short, long = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        kind = ir.MemRefType(x.type)
        rows, stride = kind.shape
        indices, shared = utils.memref_ptr(source), utils.memref_ptr(tile)
        numbers = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(x))
        bytes_copied, nothing = utils.c(2 * ATOM, short), utils.c(0, short)
        thread = FragmentedArray.splat(utils.thread_idx(), (), is_signed=False) % LANES
        for row, beside, place in places(thread, height, width):
            index = utils.getelementptr(indices, [value(first + row)], short)
            index = llvm.load(short, index)
            inside = arith.cmpi(arith.CmpIPredicate.ult, index, utils.c(rows, short))
            safe = arith.extui(long, arith.select(inside, index, nothing))
            start = arith.muli(safe, utils.c(stride, long))
            start = arith.addi(start, arith.extui(long, value(column + beside)))
            nvvm.cp_async_shared_global(
                utils.getelementptr(shared, [value(place)], kind.element_type),
                utils.getelementptr(numbers, [start], kind.element_type),
                2 * ATOM,
                nvvm.LoadCacheModifierKind.CG,
                cp_size=arith.select(inside, bytes_copied, nothing),
            )

    def value(scalar):
        return scalar.registers.item()

    copy(x, source, first, column, tile)


def _swizzled() -> Any:
    plgpu = mosaic_gpu()
    return plgpu.RefType((plgpu.TilingTransform((ATOM, WIDE)), plgpu.SwizzleTransform(2 * WIDE)))


def close_group() -> None:
    """Those of this thread's copies that are in no group make one."""

    @mosaic_gpu().inline_mgpu()
    def close(context):
        from jax.experimental.mosaic.gpu.utils import nvvm

        nvvm.cp_async_commit_group()

    close()


def wait_for_copies(pending: int) -> None:
    """Until this thread's copies are there but for those of the last `pending` groups."""

    @mosaic_gpu().inline_mgpu()
    def wait(context):
        from jax.experimental.mosaic.gpu.utils import nvvm

        nvvm.cp_async_wait_group(pending)

    wait()


def scatter_rows(
    target: Target, tile: Any, own: tuple[Any, Any], into: Any, start: Any, column: Any, out: Any
) -> None:
    """Writes ``tile[r]`` to ``out[into[start + r], column:]`` for some rows r of a tile, where that
    index is not past the end.

    Args:
      tile: in registers, of a multiple of `ATOM` rows and of 64 or 128 columns.
      own: the first of the rows and their number; the others are another group's.
    """

    def store(staged):
        staged[...] = tile.astype(out.dtype)
        mosaic_gpu().commit_smem()
        write = store_copies if isinstance(target, Gpu) else write_rows
        write(staged, *own, into, start, column, out)

    pl.run_scoped(store, mosaic_gpu().SMEM(tile.shape, out.dtype))


def write_rows(staged: Any, first: Any, size: Any, into: Any, start: Any, column: Any, out: Any):
    """What `store_copies` does, row by row, for an interpreter."""

    def write(row, _):
        index = into[start + row]

        @pl.when((index >= 0) & (index < out.shape[0]))
        def _():
            out[index, pl.ds(column, staged.shape[1])] = staged[row]

    lax.fori_loop(first, first + size, write, None)


def store_copies(staged: Any, first: Any, size: Any, into: Any, start: Any, column: Any, out: Any):
    """Stores ``staged[r, c]`` to ``out[into[start + r], column + c]`` for `size` rows from `first`
    on, 16 bytes at a time; nothing where the index is past the end.

    Args:
      staged: in shared memory, ``[8 m, 64 n]`` of 16-bit numbers, which every warp has written.
    """
    plgpu = mosaic_gpu()
    number, (height, width) = plgpu.Layout.WG_SPLAT, staged.shape
    types = (_swizzled(), number, number, plgpu.RefType(), number, number, plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=types)
    def copy(context, staged, first, size, into, start, column, out):
        from jax.experimental.mosaic.gpu import FragmentedArray, utils
        from jax.experimental.mosaic.gpu.utils import arith, ir, llvm

        short, long = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        four = ir.VectorType.get((4,), short)
        below = arith.CmpIPredicate.ult
        kind = ir.MemRefType(out.type)
        rows, stride = kind.shape
        indices, shared = utils.memref_ptr(into), utils.memref_ptr(staged)
        numbers = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(out))
        thread = FragmentedArray.splat(utils.thread_idx(), (), is_signed=False) % LANES
        found = []
        # All loads before all stores: they are on their way together.
        for row, beside, place in places(thread, height, width):
            index = utils.getelementptr(indices, [value(start + row)], short)
            index = llvm.load(short, index)
            inside = arith.cmpi(below, index, utils.c(rows, short))
            mine = arith.cmpi(below, arith.subi(value(row), value(first)), value(size))
            at = utils.getelementptr(shared, [value(place)], kind.element_type)
            piece = llvm.load(four, at, alignment=2 * ATOM)
            found.append((arith.andi(inside, mine), index, value(column + beside), piece))
        for kept, index, beside, piece in found:
            begin = arith.muli(arith.extui(long, index), utils.c(stride, long))
            begin = arith.addi(begin, arith.extui(long, beside))
            at = utils.getelementptr(numbers, [begin], kind.element_type)
            with utils.when(kept):
                llvm.store(piece, at, alignment=2 * ATOM)

    def value(scalar):
        return scalar.registers.item()

    copy(staged, first, size, into, start, column, out)
