"""Decode attention kernel for MLA: one query token per row over a cache of latent vectors (split-KV
flash decoding, as FlashMLA).

All heads of a row attend to the same vectors (`moe.attention.latent`), whose first elements are the
values too. So a program loads each column once, for both products and 64 heads: 121 operations a
byte at DeepSeek-V3's sizes. A key/value head of grouped-query attention has as many as queries
share it.

The output of 64 heads with 512 elements does not fit into the registers of one warpgroup. A program
has two warpgroups, as FlashMLA's have. The first multiplies queries and columns, writes the
exponentials to shared memory for both, and sums few of the elements; the second loads the columns,
a block ahead, and sums the others (`value_slices`). A program loops over multiple blocks with an
online softmax, since its output is about as large as two blocks. The splits of a row are merged as
in `moe.kernels.decode_attention`.

References:
  DeepSeek-AI, "FlashMLA", 2025. https://github.com/deepseek-ai/FlashMLA
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe.kernels.choice import call_implementation, unsupported_dtype, unsupported_dtypes
from moe.kernels.decode_attention import (
    UNIT,
    merge_splits,
    obstacle_of_cache,
    plain_decode_attention,
)
from moe.kernels.grouped import zero_outside
from moe.kernels.mosaic import THREAD, Target, launch, mosaic_gpu, product

BLOCK = UNIT
"""Columns that are multiplied at a time: with more, two blocks do not fit into shared memory."""
HEADS = 64
"""Heads of one program; those past the last of a row are padding."""
SLOTS = 2
"""Blocks in shared memory: one is read while the other is being filled."""
MAX_WIDTH, MAX_RANK = 576, 512
"""Elements of a vector, at most: two blocks and the queries fill the shared memory. And elements of
its values, at most: the second warpgroup sums 384 in 192 registers of each thread."""
MAX_PRODUCT = 256
"""Columns of a product, at most, by one instruction of the matrix units."""
MIN_PROGRAMS, MIN_COLUMNS = 4 * 132, 256
"""Least number of programs, where rows have enough columns: four for each multiprocessor of an
H100, so that rows of different lengths keep all of them busy. And least number of columns of a
program: with fewer, writing and merging the splits costs more than reading them."""

Slices = tuple[tuple[int, int], ...]
"""The first element and the number of elements of each of several slices of a vector."""


def latent_decode_attention(
    query: Float[Array, "row heads narrow"],
    vectors: Float[Array, "*layer row 1 narrow column"],
    first: Int[Array, "row"],
    stop: Int[Array, "row"],
    scale: float,
    *,
    rank: int,
    layer: int | Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "row heads rank"]:
    """Attention of each query over the latent vectors of its row in the columns ``first <= column <
    stop``; the values are the first `rank` elements of a vector.

    Scores and softmax are float32, exponentials are rounded to the dtype of the vectors and the
    sums are float32. The contents of other columns have no effect, even NaN. It has no gradient.

    Args:
      query: absorbed (`moe.attention.latent.absorb_keys`).
      vectors: in the layout of `moe.cache.Cache`.
      first, stop, layer: as for `moe.kernels.decode_attention.decode_attention`.
      scale: multiplies the scores.
      implementation: "mosaic", the kernel, for half precision, vectors of a multiple of 64 numbers
        up to 576, a rank of a multiple of 128 up to 512, and columns that are a multiple of 64;
        None and "plain" are `moe.ops.attention.cached_attention`.

    Raises:
      ValueError: on another implementation, and where "mosaic" does not support the call.
    """
    stacked = vectors if vectors.ndim == 5 else vectors[None]
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    return call_implementation(
        implementation,
        partial(_plain, rank=rank, scale=scale),
        partial(_mosaic, rank=rank, scale=scale),
        (query, stacked, first, stop, layer),
        operation="latent_decode_attention",
        obstacle=_obstacle(implementation, query, vectors, rank),
        hopper_only=True,
    )


def unsupported_vectors(dtype: Any, width: int, rank: int) -> str | None:
    """The reason why the kernel does not support vectors of this width with values of their first
    `rank` elements; None if it does."""
    reason = unsupported_dtype("vectors", dtype)
    if reason is not None:
        return reason
    if width % 64 or not 0 < width <= MAX_WIDTH:
        return f"vectors of {width} elements (needs a multiple of 64 up to {MAX_WIDTH})"
    if rank % 128 or not 0 < rank <= min(width, MAX_RANK):
        return f"kv_lora_rank={rank} (needs a multiple of 128 up to {MAX_RANK})"
    return None


def _obstacle(name: str | None, query: Array, vectors: Array, rank: int) -> str | None:
    reason = unsupported_dtypes("query and vectors", query, vectors)
    reason = reason or unsupported_vectors(query.dtype, query.shape[-1], rank)
    return obstacle_of_cache(name, reason, vectors.shape[-1])


def _plain(query, vectors, *selection, rank: int, scale: float) -> Array:
    values = jnp.swapaxes(vectors[..., :rank, :], -2, -1)
    return plain_decode_attention(query, vectors, values, *selection, scale=scale)


def _mosaic(*operands: Array, rank: int, scale: float, interpreted: bool) -> Array:
    assert not interpreted
    return split_latent_attention(*operands, rank=rank, scale=scale)


def split_latent_attention(
    query: Float[Array, "row heads narrow"],
    vectors: Float[Array, "layer row 1 narrow column"],
    first: Int[Array, "row"],
    stop: Int[Array, "row"],
    layer: Int[Array, ""],
    *,
    rank: int,
    scale: float,
    length: int | None = None,
    simulated: bool = False,
) -> Float[Array, "row heads rank"]:
    """`latent_decode_attention` by the kernel.

    Args:
      length: columns of a program, a multiple of `BLOCK`; None is by `MIN_PROGRAMS` and
        `MIN_COLUMNS`.
      simulated: see `moe.kernels.mosaic.launch`.
    """
    (rows, heads, width), num_columns = query.shape, vectors.shape[-1]
    tiles = -(-heads // HEADS)
    length = split_length(rows * tiles, num_columns) if length is None else length
    splits = -(-num_columns // length)
    padded = jnp.pad(query, ((0, 0), (0, tiles * HEADS - heads), (0, 0)))
    visible = (x.astype(jnp.int32) for x in (first, stop))

    def body(target, program, layer, first, stop, query, vectors, out, most, total):
        # Programs of the same columns are neighbours: the second finds them in the L2 cache.
        tile, rest = lax.rem(program, jnp.int32(tiles)), lax.div(program, jnp.int32(tiles))
        row, split = lax.div(rest, jnp.int32(splits)), lax.rem(rest, jnp.int32(splits))
        # The visible range of the split, relative to its first column.
        start = split * length
        begin = jnp.maximum(first[row] - start, 0)
        end = jnp.minimum(stop[row] - start, length)

        def load_block(index):
            columns = pl.ds(start + index * BLOCK, BLOCK)
            return vectors.at[layer[0], row, 0, :, columns]

        # Hidden splits leave their outputs unwritten; `merge_splits` does not read them.
        @pl.when(begin < end)
        def _():
            out_rows = pl.ds(program * HEADS, HEADS)
            inputs = SplitInputs(
                target, query.at[row * tiles + tile], load_block, begin, end, rank, scale
            )
            _attend(inputs, out.at[out_rows], most.at[out_rows], total.at[out_rows])

    out, most, total = launch(
        body,
        rows * splits * tiles,
        output_shapes(rows, heads, rank, num_columns, length),
        [layer.reshape(1), *visible, padded.reshape(rows * tiles, HEADS, width), vectors],
        operation="latent_decode_attention",
        threads=2,
        simulated=simulated,
    )
    split_shape = (rows, 1, splits, tiles * HEADS)
    attention = merge_splits(
        out.reshape(*split_shape, rank),
        most.reshape(split_shape),
        total.reshape(split_shape),
        first,
        stop,
        length,
    )
    return attention[:, 0, :heads].astype(vectors.dtype)


def output_shapes(
    rows: int, heads: int, rank: int, num_columns: int, length: int | None = None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the kernel's outputs before they are merged: sums of values, largest scores and
    sums of exponentials.

    Args:
      rank: elements of the output of a head.
      num_columns: columns of the cache.
      length: columns of a program, as for `split_latent_attention`.
    """
    tiles = -(-heads // HEADS)
    length = split_length(rows * tiles, num_columns) if length is None else length
    num_outputs = rows * tiles * HEADS * -(-num_columns // length)
    shapes = (num_outputs, rank), (num_outputs,), (num_outputs,)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def split_length(tiles: int, num_columns: int) -> int:
    """Columns of a program, for a number of tiles of heads of all rows and a size of the cache."""
    # As many splits as keep all multiprocessors busy, but no shorter than `MIN_COLUMNS` columns.
    splits = max(1, min(-(-MIN_PROGRAMS // tiles), num_columns // MIN_COLUMNS))
    return -(-num_columns // (splits * BLOCK)) * BLOCK


def value_slices(rank: int) -> tuple[Slices, Slices]:
    """Slices of the values that each of the two warpgroups sums.

    The first also computes the scores, for which it needs registers: 32 for them, and more for the
    addresses of 36 products. So it sums 128 of 512 elements, in 64 registers. It has more to
    multiply than the second even so.
    """
    share = UNIT * max(1, rank // 256)
    rest = [(at, min(MAX_PRODUCT, rank - at)) for at in range(share, rank, MAX_PRODUCT)]
    return ((0, share),), tuple(rest)


class SplitInputs(NamedTuple):
    """Inputs of a program: queries of a tile of heads, and a split of a row's columns.

    Attributes:
      target: the machine it runs on.
      query: ``[head, narrow]``.
      block: from the index of a block to its columns, ``[narrow, column]``.
      begin, end: range of visible columns, relative to the first of block 0; at least one.
      rank: number of elements of a vector that are its values.
      scale: multiplies the scores.
    """

    target: Target
    query: Any
    block: Callable[[Any], Any]
    begin: Any
    end: Any
    rank: int
    scale: float

    @property
    def blocks(self) -> tuple[Any, Any]:
        """The first block with visible columns, and one past the last."""
        size = jnp.int32(BLOCK)
        return lax.div(self.begin, size), lax.div(self.end + BLOCK - 1, size)

    def zero_sums(self, slices: Slices) -> tuple[Any, ...]:
        """Sums of no column, ``[head, element]`` for each slice of the values."""
        return tuple(self.target.full((self.query.shape[0], size), 0.0) for _, size in slices)

    def add_values(
        self, sums: tuple[Any, ...], slices: Slices, shrink: Any, powers: Any, columns: Any
    ) -> tuple[Any, ...]:
        """``shrink * total`` plus the weighted sum of these columns, for each slice of the
        values."""

        def add(total, start, size):
            values = self.target.transpose(columns.at[pl.ds(start, size)])
            return self.target.add_product(
                total * self.target.broadcast(shrink, total.shape), powers, values
            )

        return tuple(add(total, *part) for total, part in zip(sums, slices, strict=True))

    def store_sums(self, out: Any, sums: tuple[Any, ...], slices: Slices) -> None:
        """Writes the sums of these slices to the rows of the output."""
        for total, (start, size) in zip(sums, slices, strict=True):
            self.target.store(out.at[:, pl.ds(start, size)], total)


class SharedMemory(NamedTuple):
    """Shared memory and barriers of the two warpgroups of a program.

    Attributes:
      query, slots, powers, shrink: memory of the queries, of blocks, of the exponentials of one
        block, and of the factor by which that block rescales the sums so far.
      query_arrived, arrived: barriers: the queries have been copied; the block of a slot has.
      powers_written: barrier: the exponentials of a block are written.
      first_summed: barrier: the first warpgroup has added the block.
      second_summed: barrier: the second has added it too, and the exponentials may be overwritten.
    """

    query: Any
    slots: Any
    powers: Any
    shrink: Any
    query_arrived: Any
    arrived: Any
    powers_written: Any
    first_summed: Any
    second_summed: Any


def _attend(inputs: SplitInputs, out, most, total) -> None:
    """Writes the largest score, and relative to it the sums of values and of exponentials."""
    # Memory at DeepSeek-V3's sizes: queries 72 KiB, two blocks 144 KiB, exponentials 8 KiB. That is
    # nearly all of a multiprocessor, so exponentials have one buffer and blocks two.
    gpu, (heads, width) = mosaic_gpu(), inputs.query.shape
    memory = [
        gpu.SMEM((heads, width), inputs.query.dtype),
        gpu.SMEM((SLOTS, width, BLOCK), inputs.query.dtype),
        gpu.SMEM((heads, BLOCK), inputs.query.dtype),
        gpu.SMEM((heads,), jnp.float32),
    ]
    barriers = [gpu.Barrier(num_barriers=num_barriers) for num_barriers in (1, SLOTS, 1, 1, 1)]

    # For each block, in this order:
    #   first:  wait arrived, compute exponentials, wait taken (of the block before), write them,
    #           arrive weighed, add its slice, arrive summed
    #   second: wait arrived and weighed, add its slices, wait summed, refill the slot,
    #           arrive taken
    # A slot is refilled only after both have read it, and there is one buffer of exponentials, so
    # the second warpgroup is at most one block behind.
    def split(*shared):
        warpgroup = lax.axis_index(THREAD)
        first, second = value_slices(inputs.rank)
        outputs = out, most, total
        pl.when(warpgroup == 0)(partial(_score, inputs, SharedMemory(*shared), first, *outputs))
        pl.when(warpgroup == 1)(partial(_load_and_sum, inputs, SharedMemory(*shared), second, out))

    pl.run_scoped(split, *memory, *barriers, collective_axes=THREAD)


def _score(inputs: SplitInputs, shared: SharedMemory, slices: Slices, out, most, total) -> None:
    """First warpgroup: scores, exponentials, and the first slice of the values."""
    gpu, target = mosaic_gpu(), inputs.target
    heads, (lowest, highest) = inputs.query.shape[0], inputs.blocks

    def step(index, carry):
        sums, largest, powers_so_far = carry
        slot = _slot(index, lowest)
        columns = shared.slots.at[slot]
        begin, end = inputs.begin - index * BLOCK, inputs.end - index * BLOCK
        gpu.barrier_wait(shared.arrived.at[slot])

        # Hidden columns may hold NaN or infinity, and zero times these is not zero. Only the values
        # are cleared, 64 at a time as registers are few; scores are replaced below.
        @pl.when((begin > 0) | (end < BLOCK))
        def _():
            def clear(tile, _):
                zero_outside(target, columns.at[pl.ds(tile * 64, 64)], begin, end, axis=1)

            lax.fori_loop(0, inputs.rank // 64, clear, None)
            gpu.commit_smem()

        scores = product(shared.query, columns) * inputs.scale
        visible = target.in_range(scores.shape, 1, begin, end)
        # Minus infinity is safe: every block in the range has a visible column, so from the first
        # one on the maximum is finite.
        scores = jnp.where(visible, scores, target.full(scores.shape, -jnp.inf))
        new_largest = jnp.maximum(largest, target.tiled(jnp.max(scores, axis=1)))
        shrink = jnp.exp(largest - new_largest)
        powers = jnp.exp(scores - target.broadcast(new_largest, scores.shape))
        powers_so_far = powers_so_far * shrink + target.tiled(jnp.sum(powers, axis=1))

        # The other warpgroup may still be reading the exponentials of the block before.
        @pl.when(index > lowest)
        def _():
            gpu.barrier_wait(shared.second_summed)

        shared.powers[...] = powers.astype(shared.powers.dtype)
        target.store(shared.shrink, shrink)
        # The matrix units read shared memory through another proxy: writes are fenced first.
        gpu.commit_smem()
        gpu.barrier_arrive(shared.powers_written)
        sums = inputs.add_values(sums, slices, shrink, shared.powers, columns)
        gpu.barrier_arrive(shared.first_summed)
        return sums, new_largest, powers_so_far

    # The queries are copied once, by the other warpgroup, and stay in shared memory.
    gpu.barrier_wait(shared.query_arrived)
    start = inputs.zero_sums(slices), target.full((heads,), -jnp.inf), target.full((heads,), 0.0)
    sums, largest, powers = lax.fori_loop(lowest, highest, step, start)
    # The wait for the last block: arrivals and waits are then equally many.
    gpu.barrier_wait(shared.second_summed)
    inputs.store_sums(out, sums, slices)
    target.store(most, largest)
    target.store(total, powers)


def _load_and_sum(inputs: SplitInputs, shared: SharedMemory, slices: Slices, out) -> None:
    """Second warpgroup: copies blocks to shared memory, and adds the other slices of their
    values."""
    gpu, target = mosaic_gpu(), inputs.target
    lowest, highest = inputs.blocks

    def load_block(index):
        @pl.when(index < highest)
        def _():
            slot = _slot(index, lowest)
            gpu.copy_gmem_to_smem(
                inputs.block(index), shared.slots.at[slot], shared.arrived.at[slot]
            )

    def step(index, sums):
        slot = _slot(index, lowest)
        gpu.barrier_wait(shared.arrived.at[slot])
        gpu.barrier_wait(shared.powers_written)
        shrink = target.load(shared.shrink, 0)
        sums = inputs.add_values(sums, slices, shrink, shared.powers, shared.slots.at[slot])
        # Both warpgroups are done with this slot, so the copy may overwrite it.
        gpu.barrier_wait(shared.first_summed)
        load_block(index + SLOTS)
        gpu.barrier_arrive(shared.second_summed)
        return sums

    gpu.copy_gmem_to_smem(inputs.query, shared.query, shared.query_arrived)
    # Both slots are filled before the loop, which then stays one block ahead.
    for ahead in range(SLOTS):
        load_block(lowest + ahead)
    sums = lax.fori_loop(lowest, highest, step, inputs.zero_sums(slices))
    inputs.store_sums(out, sums, slices)


def _slot(index: Any, lowest: Any) -> Any:
    return lax.rem(index - lowest, jnp.int32(SLOTS))
