"""Decode attention kernel: one query token per row over a KV cache (flash decoding, split-KV).

A program has the queries of one key/value head of a row and 128 columns of the cache, or 64 of wide
heads: it computes scores, their softmax among these columns and the weighted sum of values, both
products by the matrix units. The splits of a row are merged by the largest score and the sum of
exponentials of each. A program whose columns are all hidden reads nothing: the time of a step
follows the lengths of the rows, not the size of the cache.

References:
  Dao et al., "Flash-Decoding for long-context inference", 2023.
  https://crfm.stanford.edu/2023/10/12/flashdecoding.html
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe.kernels.choice import call_implementation, unsupported_dtype, unsupported_dtypes
from moe.kernels.grouped import store_rows, tile_width, zero_outside
from moe.kernels.mosaic import Target, launch, mosaic_gpu, product
from moe.ops.attention import cached_attention

MAX_COLUMNS = 128
"""Columns of one program, at most (`columns_per_program`)."""
UNIT = 64
"""The number of columns of a cache is a multiple of this: the least that the matrix units take."""
MIN_QUERIES = 64
"""Rows that the matrix units multiply at least; the queries of a head are padded to them."""
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
    if group > MIN_QUERIES:
        return f"{group} query heads per key/value head (at most {MIN_QUERIES})"
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
    simulated: bool = False,
) -> Float[Array, "row heads v_head_dim"]:
    """`decode_attention` by the kernel.

    Args:
      simulated: see `moe.kernels.mosaic.launch`.
    """
    rows, heads, head_dim = query.shape
    kv_heads, width, num_columns = keys.shape[2], values.shape[-1], keys.shape[-1]
    columns = columns_per_program(head_dim, width)
    group, splits = heads // kv_heads, -(-num_columns // columns)
    factor = head_dim**-0.5 if scale is None else scale
    by_kv_head = query.reshape(rows * kv_heads, group, head_dim)
    # All query heads of a key/value head in one product: its keys are then read once.
    by_kv_head = jnp.pad(by_kv_head, ((0, 0), (0, MIN_QUERIES - group), (0, 0)))
    visible = (x.astype(jnp.int32) for x in (first, stop))

    def body(target, program, layer, first, stop, query, keys, values, out, most, total):
        # Splits of a row are neighbours, so that a long row is spread over the multiprocessors.
        split = lax.rem(program, jnp.int32(splits))
        head = lax.div(program, jnp.int32(splits))
        row, kv_head = lax.div(head, jnp.int32(kv_heads)), lax.rem(head, jnp.int32(kv_heads))
        # The visible range relative to this split; it may start before it or end after it.
        begin, end = first[row] - split * columns, stop[row] - split * columns

        # Hidden splits leave their outputs unwritten; `merge_splits` does not read them.
        @pl.when((begin < columns) & (end > 0))
        def _():
            sources = (
                query.at[head],
                keys.at[layer[0], row, kv_head, :, pl.ds(split * columns, columns)],
                values.at[layer[0], row, kv_head, pl.ds(split * columns, columns)],
            )
            tiles, largest, sums = _attend_columns(target, sources, begin, end, factor)
            # Only the rows of real queries: the padding would be most of what is written.
            for index, weighted_values in enumerate(tiles):
                store_rows(weighted_values, 0, jnp.int32(group), program * group, index, out)
            queries = pl.ds(program * MIN_QUERIES, MIN_QUERIES)
            target.store(most.at[queries], largest)
            target.store(total.at[queries], sums)

    out, most, total = launch(
        body,
        rows * kv_heads * splits,
        output_shapes(rows, heads, kv_heads, head_dim, width, num_columns),
        [layer.reshape(1), *visible, by_kv_head, keys, values],
        operation="decode_attention",
        simulated=simulated,
    )
    # Merged by XLA after the kernel: splits are few, and no program has to wait for another.
    split_shape = (rows, kv_heads, splits, -1)
    attention = merge_splits(
        out.reshape(*split_shape[:3], group, width),
        most.reshape(split_shape)[..., :group],
        total.reshape(split_shape)[..., :group],
        first,
        stop,
        columns,
    )
    return attention.reshape(rows, heads, width).astype(values.dtype)


def columns_per_program(head_dim: int, width: int) -> int:
    """Columns of a program, for the widths of a key head and of a value head. With 64 of wide heads
    two programs fit on a multiprocessor, so that one multiplies while the other's copies arrive."""
    return MAX_COLUMNS if head_dim + width <= 256 else UNIT


def output_shapes(
    rows: int, heads: int, kv_heads: int, head_dim: int, width: int, num_columns: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the kernel's outputs, which `merge_splits` reads: sums of values, largest scores
    and sums of exponentials.

    Args:
      heads: query heads.
      head_dim, width: width of a key head and of a value head.
      num_columns: columns of the cache.
    """
    programs = rows * kv_heads * -(-num_columns // columns_per_program(head_dim, width))
    sums = (programs * MIN_QUERIES,)
    shapes = (programs * (heads // kv_heads), width), sums, sums
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def _attend_columns(target: Target, sources, begin, end, factor: float):
    """Attention over the columns of a program: for each query the sum of values weighted by
    exponentials, in tiles of at most `MAX_TILE` elements, the largest score, and the sum of
    exponentials relative to it."""

    def attend_loaded(query, keys, values, arrived):
        # A program has one block, so there is nothing to overlap a copy with inside it; several
        # programs on a multiprocessor overlap each other's.
        for source, buffer in zip(sources, (query, keys, values), strict=True):
            mosaic_gpu().copy_gmem_to_smem(source, buffer, arrived)
        mosaic_gpu().barrier_wait(arrived)

        # Hidden columns may hold NaN or infinity, and zero times these is not zero. Keys need no
        # such care: their scores are replaced below. A slice at a time, as registers are few.
        @pl.when((begin > 0) | (end < values.shape[0]))
        def _():
            def clear(tile, _):
                zero_outside(target, values.at[:, pl.ds(tile * UNIT, UNIT)], begin, end)

            lax.fori_loop(0, values.shape[1] // UNIT, clear, None)
            mosaic_gpu().commit_smem()

        scores = product(query, keys) * factor
        visible = target.in_range(scores.shape, 1, begin, end)
        # Minus infinity is safe: at least one column is visible, so the maximum is finite.
        scores = jnp.where(visible, scores, target.full(scores.shape, -jnp.inf))
        largest = target.tiled(jnp.max(scores, axis=1))
        powers = jnp.exp(scores - target.broadcast(largest, scores.shape))
        sums = target.tiled(jnp.sum(powers, axis=1))

        # Relative to the largest score of the split, so that no exponential overflows;
        # `merge_splits` rescales it to the largest of the row. Through shared memory, as `product`
        # takes both operands from there.
        def weigh_values(staged):
            staged[...] = powers.astype(staged.dtype)
            mosaic_gpu().commit_smem()
            size = tile_width(values.shape[1], MAX_TILE)
            starts = range(0, values.shape[1], size)
            return tuple(product(staged, values.at[:, pl.ds(start, size)]) for start in starts)

        staged = mosaic_gpu().SMEM(scores.shape, sources[2].dtype)
        return pl.run_scoped(weigh_values, staged), largest, sums

    gpu = mosaic_gpu()
    buffers = [gpu.SMEM(source.shape, source.dtype) for source in sources]
    return pl.run_scoped(attend_loaded, *buffers, gpu.Barrier(num_arrivals=len(sources)))


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
