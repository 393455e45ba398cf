"""Backward pass of attention on Hopper's matrix units: one kernel for the gradients of queries,
which loops over keys, and one for the gradients of keys and values, which loops over queries.

Each element is summed by one program, in registers and in a fixed order, so results are
deterministic: sums in memory would need atomics, whose order and rounding vary. The price is that
both kernels compute the scores. For keys and values a program sums over all query heads that share
them.

References:
  Dao, "FlashAttention-2", 2023, algorithm 2. https://arxiv.org/abs/2307.08691
"""

from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from moe.kernels.attention.blocks import (
    BASE_2,
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
from moe.kernels.attention.forward import locate_query_block, quotient_remainder
from moe.kernels.attention.pipeline import run_pipeline
from moe.kernels.mosaic import launch, product
from moe.ops.attention import Key, Output, PerQuery, Query, Value
from moe.ops.mask import Mask

Run = Callable[..., tuple[Array, ...]]
"""`moe.kernels.mosaic.launch` with the options of both kernels."""


class AttentionOperands(NamedTuple):
    """Inputs of both kernels, in blocks of `UNIT` tokens of all rows and heads.

    Attributes:
      query, out_gradient, key, value: ``[block, token, width]``.
      row_stats: ``[block, 2, query]``: the log-sum-exp of each query's scores, in base 2, and
        `moe.ops.attention.dot_do_o`.
      query_mask, key_mask: mask fields, as `mask_operands` gives them.
    """

    query: Any
    out_gradient: Any
    key: Any
    value: Any
    row_stats: Any
    query_mask: Any
    key_mask: Any


class AttentionSizes(NamedTuple):
    """Static sizes of the operands.

    Attributes:
      rows, kv_heads: number of rows and of key/value heads.
      group: number of query heads of each key/value head.
      queries, keys: number of blocks of queries and of keys of a row.
      scale: multiplies the scores.
    """

    rows: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    scale: float


def attend_gradient(
    query: Query,
    key: Key,
    value: Value,
    mask: Mask,
    log_sum: PerQuery,
    softmax_d: PerQuery,
    out_gradient: Output,
    scale: float,
    *,
    dtype: Any = jnp.float32,
    simulated: bool = False,
) -> tuple[Query, Key, Value]:
    """`moe.attention.blocked.attend_gradient` by the kernels.

    Probabilities and score gradients are rounded to the dtype of the queries; all else is float32.

    Args:
      query, key, value: as for `moe.kernels.attention.forward.attend`; `out_gradient` is as they
        are.
      dtype: dtype of the gradients, rounded once.
      simulated: see `moe.kernels.mosaic.launch`.
    """
    (rows, kv_heads, group, time, width), wide = query.shape, value.shape[-1]
    source = key.shape[-2]
    query, key, value, out_gradient = (
        pad_to_blocks(x, -2) for x in (query, key, value, out_gradient)
    )
    query_mask, key_mask = pad_mask(mask.query), pad_mask(mask.key)
    units = block_mask(query_mask, UNIT), block_mask(key_mask, UNIT)
    mask_fields = mask_operands(*units, mask.window)
    # In base 2, so that probabilities are exp2(score - log_sum): one instruction per score. One
    # array for both numbers: a block of it is a single copy to shared memory.
    per_query = [pad_to_blocks(x, -1).reshape(-1, UNIT) for x in (log_sum * BASE_2, softmax_d)]
    blocks = map(in_blocks, (query, out_gradient, key, value))
    operands = AttentionOperands._make([*blocks, jnp.stack(per_query, axis=1), *mask_fields])
    queries, keys = (unit.column.shape[1] for unit in units)
    sizes = AttentionSizes(rows, kv_heads, group, queries, keys, scale)
    run = partial(
        launch, operation="the gradient of attention", approximate=True, simulated=simulated
    )

    # Two tables, as the blocks that a program holds and those that it visits differ in size.
    block_tokens = UNIT * query_blocks_per_program(width, wide)
    table = visit_table(block_mask(query_mask, block_tokens), units[1], mask.window, by_query=True)
    grad_query = _query_gradients(operands, table, sizes, dtype, run)
    block_tokens = UNIT * key_blocks_per_program(width, wide)
    table = visit_table(units[0], block_mask(key_mask, block_tokens), mask.window, by_query=False)
    grad_key, grad_value = _key_value_gradients(operands, table, sizes, dtype, run)
    return (
        grad_query.reshape(query.shape)[..., :time, :],
        grad_key.reshape(key.shape)[..., :source, :],
        grad_value.reshape(value.shape)[..., :source, :],
    )


def query_blocks_per_program(width: int, wide: int) -> int:
    """Blocks of queries of a program, one for each warpgroup. With two of them and very wide heads,
    shared memory has no space left for two blocks of keys and values."""
    return 2 if width + wide <= 448 else 1


def key_blocks_per_program(width: int, wide: int) -> int:
    """Blocks of keys of a program. With one block for each of two warpgroups, the registers of a
    warpgroup cannot hold both gradients of wide heads. The two then share one block, and each
    computes one of its gradients."""
    return 2 if width + wide <= 256 else 1


def _query_gradients(
    operands: AttentionOperands, table: Array, sizes: AttentionSizes, dtype: Any, run: Run
) -> Array:
    """Gradients of all queries, ``[block, query, head_dim]``."""
    width, wide = operands.key.shape[-1], operands.value.shape[-1]
    consumers = query_blocks_per_program(width, wide)
    num_blocks = sizes.queries // consumers
    # The sums and addresses of wider heads take more registers than a thread of three warpgroups
    # has.
    has_producer = max(width, wide) <= 128 or consumers == 1

    def body(target, program, table, *refs):
        *refs, grad_query = refs
        block_refs = AttentionOperands(*refs)
        # The programs have the order of the forward pass, for the same reasons.
        query_block = locate_query_block(program, sizes.group, num_blocks, sizes.kv_heads)
        visits = read_visits(table, query_block.row * num_blocks + query_block.block)
        first = (query_block.head * num_blocks + query_block.block) * consumers
        in_row = (query_block.row * num_blocks + query_block.block) * consumers

        def blocks(index):
            block_index = visits.first + index
            kv_block = query_block.source * sizes.keys + block_index
            key_mask = block_refs.key_mask.at[query_block.row * sizes.keys + block_index]
            return block_refs.key.at[kv_block], block_refs.value.at[kv_block], key_mask

        def compute(warpgroup, resident, visit):
            # A single consumer is the first warpgroup. As a constant the index keeps addresses of
            # its blocks out of registers, of which the sums of wide heads leave few.
            unit = warpgroup if consumers > 1 else 0
            query, out_gradient = (x.at[unit] for x in resident)
            # Mask fields and both numbers per query are loaded once: they stay in registers all
            # along.
            row_mask = load_mask(target, block_refs.query_mask.at[in_row + unit], 0)
            log_sum, softmax_d = load_mask(target, block_refs.row_stats.at[first + unit], 0)

            def step(index, block, total):
                keys, values, key_mask = block
                scores = product(query, target.transpose(keys)) * (sizes.scale * BASE_2)
                clear = visits.is_clear(visits.first + index)
                # Minus infinity is safe here: log_sum is finite, so a hidden score gives exactly 0,
                # also for queries that see no key, whose log_sum is about MASK_VALUE.
                scores = apply_mask(
                    target, scores, row_mask, key_mask, clear, -jnp.inf, by_query=True
                )
                powers = jnp.exp2(scores - target.broadcast(log_sum, scores.shape))
                # p (do v^T - D), the gradient of the scores (`moe.ops.attention`).
                grad_powers = product(out_gradient, target.transpose(values))
                grad_scores = powers * (grad_powers - target.broadcast(softmax_d, scores.shape))
                # As the left operand it stays in registers: no trip through shared memory.
                return target.add_product(total, grad_scores.astype(keys.dtype), keys)

            # The scale once per sum, not once per score.
            total = visit(step, target.full((UNIT, width), 0.0)) * sizes.scale
            target.store(grad_query.at[first + unit], total.astype(grad_query.dtype))

        resident_blocks = pl.ds(first, consumers)
        resident = block_refs.query.at[resident_blocks], block_refs.out_gradient.at[resident_blocks]
        run_pipeline(
            *(target, resident, blocks, visits.length, [compute] * consumers), producer=has_producer
        )

    return run(
        body,
        sizes.rows * sizes.kv_heads * sizes.group * num_blocks,
        [jax.ShapeDtypeStruct(operands.query.shape, dtype)],
        [table.reshape(-1), *operands],
        name="attention_grad_query",
        threads=consumers + has_producer,
    )[0]


def _key_value_gradients(
    operands: AttentionOperands, table: Array, sizes: AttentionSizes, dtype: Any, run: Run
) -> tuple[Array, ...]:
    """Gradients of all keys and values, ``[block, key, width]``."""
    width, wide = operands.key.shape[-1], operands.value.shape[-1]
    units = key_blocks_per_program(width, wide)
    num_blocks = sizes.keys // units

    def body(target, program, table, *refs):
        *refs, grad_key, grad_value = refs
        block_refs = AttentionOperands(*refs)
        source, block = quotient_remainder(program, num_blocks)
        row, _ = quotient_remainder(source, sizes.kv_heads)
        visits = read_visits(table, row * num_blocks + block)
        first, in_row = program * units, (row * num_blocks + block) * units
        # Blocks are numbered head after head, over all query heads of this key/value head. At least
        # 1, as numbers are divided by it even if no query sees these keys.
        visits_per_head = jnp.maximum(visits.length, 1)

        def query_block_index(index):
            return visits.first + lax.rem(index, visits_per_head)

        def blocks(index):
            head = source * sizes.group + lax.div(index, visits_per_head)
            block_index = head * sizes.queries + query_block_index(index)
            query_mask = block_refs.query_mask.at[row * sizes.queries + query_block_index(index)]
            return (
                block_refs.query.at[block_index],
                block_refs.out_gradient.at[block_index],
                block_refs.row_stats.at[block_index],
                query_mask,
            )

        def compute(warpgroup, resident, visit, gradients=(True, True)):
            # With one unit, both warpgroups work on it, and each computes one gradient.
            unit = warpgroup if units > 1 else 0
            keys, values = (x.at[unit] for x in resident)
            row_mask = load_mask(target, block_refs.key_mask.at[in_row + unit], 0)

            def step(index, block, totals):
                query, out_gradient, row_stats, query_mask = block

                # Loaded at its use: held from the start, both numbers per query would take
                # registers that the sums need.
                def row_stat(field):
                    return target.broadcast(target.load(row_stats.at[field], 1), (UNIT, UNIT), 1)

                # Keys are the rows: the transposed probabilities are then the left operand of the
                # products below, straight from registers.
                scores = product(keys, target.transpose(query)) * (sizes.scale * BASE_2)
                clear = visits.is_clear(query_block_index(index))
                scores = apply_mask(
                    target, scores, row_mask, query_mask, clear, -jnp.inf, by_query=False
                )
                powers = jnp.exp2(scores - row_stat(0))
                factors = []
                # dv = p^T do needs no product with values; dk = scale ds^T q does.
                if gradients[1]:
                    factors.append((powers, out_gradient))
                if gradients[0]:
                    grad_powers = product(values, target.transpose(out_gradient))
                    factors.append((powers * (grad_powers - row_stat(1)), query))
                return tuple(
                    target.add_product(total, left.astype(query.dtype), right)
                    for total, (left, right) in zip(totals, factors, strict=True)
                )

            # Values before keys, in the order in which `step` adds them.
            outputs = (grad_value, wide, 1.0), (grad_key, width, sizes.scale)
            outputs = [*compress(outputs, reversed(gradients))]
            totals = visit(step, tuple(target.full((UNIT, size), 0.0) for _, size, _ in outputs))
            for (out, _, factor), total in zip(outputs, totals, strict=True):
                target.store(out.at[first + unit], (total * factor).astype(out.dtype))

        consumers = [compute] * 2
        if units == 1:
            # (keys, values): the first warpgroup takes values, the second keys.
            selections = (False, True), (True, False)
            consumers = [partial(compute, gradients=selection) for selection in selections]
        resident_blocks = pl.ds(first, units)
        resident = block_refs.key.at[resident_blocks], block_refs.value.at[resident_blocks]
        # Two sums and the scores take more registers than a thread of three warpgroups has.
        count = visits.length * sizes.group
        run_pipeline(target, resident, blocks, count, consumers, producer=False)

    return run(
        body,
        sizes.rows * sizes.kv_heads * num_blocks,
        [jax.ShapeDtypeStruct(x.shape, dtype) for x in (operands.key, operands.value)],
        [table.reshape(-1), *operands],
        name="attention_grad_key_value",
        threads=2,
    )
