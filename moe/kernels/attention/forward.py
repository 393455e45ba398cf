"""Forward pass of attention on Hopper's matrix units (FlashAttention-3).

A program has 128 queries of a head, 64 for each of two warpgroups, and loops over the blocks of
keys that any of them may see, with an online softmax; a third warpgroup loads keys and values a
block ahead. Scores and exponentials stay in registers.

References:
  Shah et al., "FlashAttention-3", 2024. https://arxiv.org/abs/2407.08608
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from moe.kernels.attention.blocks import (
    BASE_2,
    MAX_BLOCK_TOKENS,
    UNIT,
    apply_mask,
    block_mask,
    in_blocks,
    load_mask,
    mask_operands,
    pad_mask,
    pad_to_blocks,
    read_visits,
    visit_table,
)
from moe.kernels.attention.pipeline import run_pipeline
from moe.kernels.mosaic import launch, product
from moe.ops.attention import Key, Output, PerQuery, Query, Value
from moe.ops.mask import Mask
from moe.ops.precision import MASK_VALUE

CONSUMERS = MAX_BLOCK_TOKENS // UNIT
"""Warpgroups of a program that compute."""


class QueryBlock(NamedTuple):
    """Indices of the block of queries that a program computes.

    Attributes:
      row: index of the row.
      source, head: indices of the key/value head and of the query head, counted over all rows.
      block: index of the block of queries in its row.
    """

    row: Any
    source: Any
    head: Any
    block: Any


def locate_query_block(program: Any, group: int, num_blocks: int, kv_heads: int) -> QueryBlock:
    """Block of queries of a program.

    Query heads that share a key/value head come one after the other, so that programs in flight
    read the same keys from the L2 cache. The last queries of a row, which see most keys, come
    first: the short ones then fill the end of the launch.
    """
    rest, member = quotient_remainder(program, group)
    source, from_last = quotient_remainder(rest, num_blocks)
    row, _ = quotient_remainder(source, kv_heads)
    return QueryBlock(row, source, source * group + member, num_blocks - 1 - from_last)


def attend(
    query: Query,
    key: Key,
    value: Value,
    mask: Mask,
    scale: float,
    *,
    dtype: Any = jnp.float32,
    simulated: bool = False,
) -> tuple[Output, PerQuery]:
    """`moe.attention.blocked.attend` by the kernel.

    Exponentials are rounded to the dtype of the values; all else is float32.

    Args:
      query, key, value: arrays that `moe.kernels.attention.obstacle` accepts, with one
        batch dimension in front.
      dtype: dtype of the output, rounded once.
      simulated: see `moe.kernels.mosaic.launch`.
    """
    (rows, kv_heads, group, time, width), wide = query.shape, value.shape[-1]
    query, key, value = (pad_to_blocks(x, -2) for x in (query, key, value))
    query_mask, key_mask = pad_mask(mask.query), pad_mask(mask.key)
    size = keys_per_block(width, wide)
    sources = block_mask(key_mask, size)
    # Computed before the kernel: a program reads four numbers instead of all mask fields of its
    # row.
    table = visit_table(
        block_mask(query_mask, MAX_BLOCK_TOKENS), sources, mask.window, by_query=True
    )
    query_mask, key_mask = mask_operands(block_mask(query_mask, UNIT), sources, mask.window)
    num_blocks, num_sources = table.shape[1], sources.column.shape[1]
    # The sums of wider values take more registers than a thread of three warpgroups has.
    has_producer = wide <= 128

    def body(target, program, table, query_mask, key_mask, query, key, value, out, log_sum):
        query_block = locate_query_block(program, group, num_blocks, kv_heads)
        # All heads of a row have the same mask, so the table is per row.
        visits = read_visits(table, query_block.row * num_blocks + query_block.block)
        # First unit of the program's queries among the units of all heads, and of all rows.
        first = (query_block.head * num_blocks + query_block.block) * CONSUMERS
        in_row = (query_block.row * num_blocks + query_block.block) * CONSUMERS

        def blocks(index):
            block_index = visits.first + index
            kv_block = query_block.source * num_sources + block_index
            return (
                key.at[kv_block],
                value.at[kv_block],
                key_mask.at[query_block.row * num_sources + block_index],
            )

        def compute(warpgroup, resident, visit):
            row_mask = load_mask(target, query_mask.at[in_row + warpgroup], 0)

            def step(index, block, carry):
                (keys, values, block_mask_ref), (sums, total, top) = block, carry
                scores = product(resident[0].at[warpgroup], target.transpose(keys))
                # The factor of base 2 is part of the scale: exp2 then needs no multiplication.
                scores *= scale * BASE_2
                clear = visits.is_clear(visits.first + index)
                scores = apply_mask(
                    target, scores, row_mask, block_mask_ref, clear, MASK_VALUE, by_query=True
                )
                now = jnp.maximum(top, target.tiled(jnp.max(scores, axis=1)))
                # While a query has seen only hidden keys, its exponentials are 1 and its sums are
                # meaningless. The first visible score multiplies them by exp2(MASK_VALUE - top), 0.
                shrink = jnp.exp2(top - now)
                powers = jnp.exp2(scores - target.broadcast(now, scores.shape))
                total = total * shrink + target.tiled(jnp.sum(powers, axis=1))
                sums *= target.broadcast(shrink, sums.shape)
                # The left operand of this product stays in registers (FlashAttention-3).
                return target.add_product(sums, powers.astype(values.dtype), values), total, now

            # `top` is in base 2 with the scale included; it becomes a natural logarithm below.
            # Finite for queries that have no key so far: the difference of two infinities is NaN.
            zeros, least = (target.full((UNIT,), fill) for fill in (0.0, MASK_VALUE))
            sums, total, top = visit(step, (target.full((UNIT, wide), 0.0), zeros, least))
            # The largest exponential is 1, so the total is at least 1 unless no block was visited.
            total = jnp.maximum(total, target.full((UNIT,), 1.0))
            attention = sums / target.broadcast(total, sums.shape)
            target.store(out.at[first + warpgroup], attention.astype(out.dtype))
            target.store(log_sum.at[first + warpgroup], top / BASE_2 + jnp.log(total))

        # Two warpgroups share each block of keys, which halves its loads per query.
        first_queries = query.at[pl.ds(first, CONSUMERS)]
        run_pipeline(
            *(target, [first_queries], blocks, visits.length, [compute] * CONSUMERS),
            producer=has_producer,
        )

    heads = rows * kv_heads * group
    units = heads * num_blocks * CONSUMERS
    kv_blocks = (in_blocks(x, size) for x in (key, value))
    out, log_sum = launch(
        body,
        heads * num_blocks,
        [
            jax.ShapeDtypeStruct((units, UNIT, wide), dtype),
            jax.ShapeDtypeStruct((units, UNIT), jnp.float32),
        ],
        [table.reshape(-1), query_mask, key_mask, in_blocks(query), *kv_blocks],
        operation="attention",
        name="attention_forward",
        threads=CONSUMERS + has_producer,
        approximate=True,
        simulated=simulated,
    )
    out = out.reshape(*query.shape[:-1], wide)
    return out[..., :time, :], log_sum.reshape(query.shape[:-1])[..., :time]


def keys_per_block(width: int, wide: int) -> int:
    """Number of keys of a block. Larger blocks wait less often; but two of them must fit in shared
    memory, and the exponentials of one in registers together with the output sums."""
    return MAX_BLOCK_TOKENS if width + wide <= 320 and wide <= 128 else UNIT


def quotient_remainder(dividend: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder."""
    return lax.div(dividend, jnp.int32(divisor)), lax.rem(dividend, jnp.int32(divisor))
