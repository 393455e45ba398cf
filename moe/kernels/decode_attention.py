"""Decode attention kernel: one query token per row over a KV cache (flash decoding, split-KV).

A program has the queries of one key/value head of a row, and loops over blocks of 64 columns with
an online softmax; the next blocks are copied to shared memory meanwhile. Both products are by the
matrix units. If there are few rows, several programs share the columns of one: the splits of a row
are merged by the largest score and the sum of exponentials of each. No block is read whose columns
are all hidden: the time of a step follows the lengths of the rows, not the size of the cache.

References:
  Dao et al., "Flash-Decoding for long-context inference", 2023.
  https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe.kernels.choice import call_implementation, unsupported_dtype, unsupported_dtypes
from moe.kernels.grouped import pad_rows, store_rows, tile_width, zero_outside
from moe.kernels.mosaic import Target, launch, mosaic_gpu, product
from moe.ops.attention import cached_attention

UNIT = 64
"""Columns of a block, which the number of columns of a cache is a multiple of: the least that the
matrix units take."""
SLOTS = 2
"""Blocks of keys and values in shared memory: one is multiplied while the next one arrives. Two
programs fit on a multiprocessor if heads have up to 128 elements."""
MIN_QUERIES = 64
"""Rows that the matrix units multiply at least. Those past the queries of a head have arbitrary
values, which are not written."""
QUERY_UNIT = 8
"""Queries are copied to shared memory in blocks of this size, with those of other heads in them."""
MIN_PROGRAMS, MIN_COLUMNS = 2 * 128, 2 * UNIT
"""Least number of programs, if rows have enough columns: about two for each multiprocessor of an
H100. And least number of columns of a program."""
MAX_TILE = 128
"""Elements of a head's output in a tile, at most: with 256 in one tile, Mosaic GPU of JAX 0.12
infers layouts of registers and shared memory for minutes."""
MAX_HEAD_DIM = 256
"""Elements of a head, at most: a wider one does not fit into registers and shared memory."""


def decode_attention(
    query: Float[Array, "row heads head_dim"],
    keys: Float[Array, "*layer row kv_heads head_dim column"],
    values: Float[Array, "*layer row kv_heads column v_head_dim"],
    first: Int[Array, "row"],
    stop: Int[Array, "row"],
    scale: float | None = None,
    *,
    layer: int | Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "row heads v_head_dim"]:
    """Attention of each query over the columns ``first <= column < stop`` of its row.

    Scores and softmax are float32, exponentials are rounded to the dtype of the values and the sums
    are float32. The contents of other columns have no effect, even NaN. It has no gradient.

    Args:
      keys, values: in the layout of `moe.cache.Cache`.
      first, stop: range of columns that a row sees, at least one.
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      layer: index of the layer, where the buffers hold all layers: a slice would be a copy.
      implementation: "mosaic", the kernel, for half precision, heads of a multiple of 64 elements
        up to 256, and columns that are a multiple of 64; None and "plain" are
        `moe.ops.attention.cached_attention`.

    Raises:
      ValueError: on another implementation, and where "mosaic" does not support the call.
    """
    # All layers are passed with an index: the kernel reads its layer in place.
    buffers = (x if x.ndim == 5 else x[None] for x in (keys, values))
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    return call_implementation(
        implementation,
        partial(plain_decode_attention, scale=scale),
        partial(_mosaic, scale=scale),
        (query, *buffers, first, stop, layer),
        operation="decode_attention",
        obstacle=_obstacle(implementation, query, keys, values),
        hopper_only=True,
    )


def unsupported_heads(dtype: Any, group: int, *widths: int) -> str | None:
    """The reason why the kernel does not support heads of these widths, of keys and of values, with
    `group` query heads for each key/value head; None if it does."""
    reason = unsupported_dtype("keys and values", dtype)
    if reason is not None:
        return reason
    for width in widths:
        if width % 64 or not 0 < width <= MAX_HEAD_DIM:
            return f"heads of {width} elements (needs a multiple of 64 up to {MAX_HEAD_DIM})"
    most = MIN_QUERIES - QUERY_UNIT
    if group > MIN_QUERIES or (group > most and group % QUERY_UNIT):
        rule = f"at most {MIN_QUERIES}, above {most} a multiple of {QUERY_UNIT}"
        return f"{group} query heads per key/value head ({rule})"
    return None


def _obstacle(name: str | None, query: Array, keys: Array, values: Array) -> str | None:
    reason = unsupported_dtypes("query, keys and values", query, keys, values)
    group, widths = query.shape[1] // keys.shape[-3], (query.shape[-1], values.shape[-1])
    reason = reason or unsupported_heads(query.dtype, group, *widths)
    return obstacle_of_cache(name, reason, keys.shape[-1])


def obstacle_of_cache(name: str | None, reason: str | None, cache_length: int) -> str | None:
    """The obstacle to a decode kernel, with the fix: its name, a reason, or the length of a
    cache."""
    if name == "interpreted":
        return "Pallas's interpreter has no matrix units; use None."
    if reason is None and cache_length % UNIT:
        reason = f"a KV cache of {cache_length} columns (needs a multiple of {UNIT})"
    return None if reason is None else f"{reason}; use None."


def plain_decode_attention(
    query, keys, values, first, stop, layer, *, scale: float | None
) -> Array:
    """Reference implementation of `decode_attention`, on buffers of all layers."""
    keys, values = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (keys, values))
    column = jnp.arange(keys.shape[-1])[None]
    visible = (column >= first[:, None]) & (column < stop[:, None])
    return cached_attention(query, keys, values, visible, scale)


def _mosaic(*operands: Array, scale: float | None, interpreted: bool) -> Array:
    assert not interpreted
    return split_attention(*operands, scale=scale)


def split_attention(
    query: Float[Array, "row heads head_dim"],
    keys: Float[Array, "layer row kv_heads head_dim column"],
    values: Float[Array, "layer row kv_heads column v_head_dim"],
    first: Int[Array, "row"],
    stop: Int[Array, "row"],
    layer: Int[Array, ""],
    *,
    scale: float | None = None,
    length: int | None = None,
    simulated: bool = False,
) -> Float[Array, "row heads v_head_dim"]:
    """`decode_attention` by the kernel.

    Args:
      length: columns of a program, a multiple of `UNIT`; None is `split_length`.
      simulated: see `moe.kernels.mosaic.launch`.
    """
    rows, heads, head_dim = query.shape
    kv_heads, width, num_columns = keys.shape[2], values.shape[-1], keys.shape[-1]
    group, factor = heads // kv_heads, head_dim**-0.5 if scale is None else scale
    length = split_length(rows * kv_heads, num_columns) if length is None else length
    splits = -(-num_columns // length)
    # All query heads of a key/value head in one product: its keys are then read once.
    num_queries = loaded_queries(group)
    queries = pad_rows(query.reshape(rows * heads, head_dim), num_queries)
    visible = (x.astype(jnp.int32) for x in (first, stop))

    def body(target, program, layer, first, stop, query, keys, values, out, *merged_by):
        # Splits of a row are neighbours, so that a long row is spread over the multiprocessors.
        split = lax.rem(program, jnp.int32(splits))
        head = lax.div(program, jnp.int32(splits))
        row, kv_head = lax.div(head, jnp.int32(kv_heads)), lax.rem(head, jnp.int32(kv_heads))
        start = split * length
        # The visible range relative to this split.
        begin = jnp.maximum(first[row] - start, 0)
        end = jnp.minimum(stop[row] - start, length)

        def block(index):
            columns = pl.ds(start + index * UNIT, UNIT)
            return (
                keys.at[layer[0], row, kv_head, :, columns],
                values.at[layer[0], row, kv_head, columns],
            )

        # Hidden splits leave their outputs unwritten; `merge_splits` does not read them.
        @pl.when(begin < end)
        def _():
            query_block = lax.div(head * group, jnp.int32(QUERY_UNIT))
            before = head * group - query_block * QUERY_UNIT
            loaded = query.at[pl.ds(query_block * QUERY_UNIT, num_queries)]
            sums, largest, total = _attend(target, loaded, block, begin, end, factor)
            if splits == 1:
                sums = [x / target.broadcast(total, x.shape) for x in sums]
            # Only the rows of its own queries: the others would be most of what is written.
            for index, tile in enumerate(sums):
                store_rows(tile, before, jnp.int32(group), program * group - before, index, out)
            for ref, vector in zip(merged_by, (largest, total), strict=False):
                target.store(ref.at[pl.ds(program * MIN_QUERIES, MIN_QUERIES)], vector)

    out, *merged_by = launch(
        body,
        rows * kv_heads * splits,
        output_shapes(rows, heads, kv_heads, width, num_columns, values.dtype, length),
        [layer.reshape(1), *visible, queries, keys, values],
        operation="decode_attention",
        simulated=simulated,
    )
    if splits == 1:
        return out.reshape(rows, heads, width)
    split_shape = rows, kv_heads, splits, -1
    # The rows of a head's own queries among those that its programs have loaded.
    begins = np.arange(rows * kv_heads) * group % QUERY_UNIT
    queries_of_row = (begins[:, None] + np.arange(group)).reshape(rows, kv_heads, 1, group)
    largest, total = (
        jnp.take_along_axis(x.reshape(split_shape), queries_of_row, axis=3) for x in merged_by
    )
    out = out.reshape(*split_shape[:3], group, width)
    attention = merge_splits(out, largest, total, first, stop, length)
    return attention.reshape(rows, heads, width).astype(values.dtype)


def loaded_queries(group: int) -> int:
    """Queries that a program copies to shared memory: the blocks that contain its `group`."""
    # A group may begin within a block and end in the next one.
    most = group if QUERY_UNIT % group == 0 else group + QUERY_UNIT - math.gcd(group, QUERY_UNIT)
    return -(-most // QUERY_UNIT) * QUERY_UNIT


def split_length(rows: int, num_columns: int) -> int:
    """Columns of a program, for a number of rows times key/value heads and a size of the cache: all
    of them, unless there are too few programs."""
    splits = min(max(1, num_columns // MIN_COLUMNS), -(-MIN_PROGRAMS // rows))
    return -(-num_columns // (splits * UNIT)) * UNIT


def output_shapes(
    rows: int,
    heads: int,
    kv_heads: int,
    width: int,
    num_columns: int,
    dtype: Any,
    length: int | None = None,
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the kernel's outputs: the attention of rows that are not split, or what
    `merge_splits` reads: sums of values, largest scores and sums of exponentials.

    Args:
      heads: query heads.
      width: elements of a value head.
      num_columns: columns of the cache.
      dtype: dtype of the values.
      length: columns of a program, as for `split_attention`.
    """
    length = split_length(rows * kv_heads, num_columns) if length is None else length
    splits = -(-num_columns // length)
    if splits == 1:
        return (jax.ShapeDtypeStruct((rows * heads, width), dtype),)
    sums = (rows * kv_heads * splits * MIN_QUERIES,)
    shapes = (rows * heads * splits, width), sums, sums
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def _attend(
    target: Target, queries, block: Callable[[Any], tuple[Any, Any]], begin, end, factor: float
) -> tuple[Sequence[Array], Array, Array]:
    """Attention over the columns of a program: for each query the sum of values weighted by
    exponentials, in tiles of at most `MAX_TILE` elements, the largest score, and the sum of
    exponentials relative to it.

    Args:
      queries: ``[query, head_dim]`` in device memory.
      block: from the index of a block to its keys and values in device memory.
      begin, end: range of visible columns, relative to the first of block 0; at least one.
      factor: multiplies the scores.
    """
    gpu, size = mosaic_gpu(), jnp.int32(UNIT)
    lowest, highest = lax.div(begin, size), lax.div(end + UNIT - 1, size)
    kinds = block(jnp.int32(0))

    def attend_blocks(query_memory, key_slots, value_slots, queries_arrived, arrived):
        width = value_slots.shape[2]
        tile = tile_width(width, MAX_TILE)

        def slot_of(index):
            return lax.rem(index - lowest, jnp.int32(SLOTS))

        def load_block(index):
            @pl.when(index < highest)
            def _():
                slot = slot_of(index)
                for source, memory in zip(block(index), (key_slots, value_slots), strict=True):
                    gpu.copy_gmem_to_smem(source, memory.at[slot], arrived.at[slot])

        def step(index, carry):
            sums, largest, total = carry
            slot, hidden = slot_of(index), index * UNIT
            keys, values = key_slots.at[slot], value_slots.at[slot]
            gpu.barrier_wait(arrived.at[slot])

            # Hidden columns may hold NaN or infinity, and zero times these is not zero. Keys need
            # no such care: their scores are replaced below. A slice at a time, as registers are
            # few.
            @pl.when((begin > hidden) | (end < hidden + UNIT))
            def _():
                def clear(part, _):
                    columns = values.at[:, pl.ds(part * 64, 64)]
                    zero_outside(target, columns, begin - hidden, end - hidden)

                lax.fori_loop(0, width // 64, clear, None)
                gpu.commit_smem()

            scores = product(query_memory, keys) * factor
            visible = target.in_range(scores.shape, 1, begin - hidden, end - hidden)
            # Minus infinity is safe: every block in the range has a visible column, so from the
            # first one on the maximum is finite.
            scores = jnp.where(visible, scores, target.full(scores.shape, -jnp.inf))
            now = jnp.maximum(largest, target.tiled(jnp.max(scores, axis=1)))
            shrink = jnp.exp(largest - now)
            powers = jnp.exp(scores - target.broadcast(now, scores.shape))
            total = total * shrink + target.tiled(jnp.sum(powers, axis=1))
            weights = powers.astype(values.dtype)
            sums = tuple(
                target.add_product(
                    x * target.broadcast(shrink, x.shape),
                    weights,
                    values.at[:, pl.ds(part * tile, tile)],
                )
                for part, x in enumerate(sums)
            )
            # All warps have read the slot, and it may be overwritten.
            gpu.commit_smem()
            load_block(index + SLOTS)
            return sums, now, total

        queries_of_row = query_memory.at[pl.ds(0, queries.shape[0])]
        gpu.copy_gmem_to_smem(queries, queries_of_row, queries_arrived)
        for ahead in range(SLOTS):
            load_block(lowest + ahead)
        gpu.barrier_wait(queries_arrived)
        zeros = target.full((MIN_QUERIES, tile), 0.0)
        least = target.full((MIN_QUERIES,), -jnp.inf), target.full((MIN_QUERIES,), 0.0)
        return lax.fori_loop(lowest, highest, step, ((zeros,) * (width // tile), *least))

    return pl.run_scoped(
        attend_blocks,
        gpu.SMEM((MIN_QUERIES, queries.shape[1]), queries.dtype),
        *(gpu.SMEM((SLOTS, *x.shape), x.dtype) for x in kinds),
        gpu.Barrier(),
        gpu.Barrier(num_arrivals=len(kinds), num_barriers=SLOTS),
    )


def merge_splits(
    out: Float[Array, "row head split query width"],
    most: Float[Array, "row head split query"],
    total: Float[Array, "row head split query"],
    first: Int[Array, "row"],
    stop: Int[Array, "row"],
    length: int,
) -> Float[Array, "row head query width"]:
    """Merges the splits of a row: sums of values over sums of exponentials, each split scaled to
    the largest score of all. A split whose columns are all hidden was not computed; its arrays
    hold arbitrary values.

    Args:
      out, total: sums of values and of exponentials, relative to the largest score of the split,
        `most`.
      first, stop: range of columns that a row sees.
      length: columns of a split.
    """
    begin = length * jnp.arange(most.shape[2], dtype=jnp.int32)[None]
    seen = (first[:, None] < begin + length) & (stop[:, None] > begin)
    seen = seen[:, None, :, None]
    most = jnp.where(seen, most, -jnp.inf)
    # Selected again below: a share of 0 times what an unwritten split holds may be NaN.
    share = jnp.exp(most - jnp.max(most, axis=2, keepdims=True))
    powers = jnp.sum(jnp.where(seen, share * total, 0.0), axis=2)
    sums = jnp.sum(jnp.where(seen[..., None], share[..., None] * out, 0.0), axis=2)
    return sums / powers[..., None]
