"""Backward pass of attention on Hopper's matrix units: one kernel for the gradients of queries,
which loops over keys, and one for those of keys and values, which loops over queries.

Each element is summed by one program, in registers and in a fixed order, so results are
deterministic: sums in memory would need atomics, whose order and rounding vary. The price is that
both kernels compute the scores. For keys and values a program sums over all query heads that share
them.

References:
  Dao, "FlashAttention-2", 2023, algorithm 2. https://arxiv.org/abs/2307.08691
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from moe.attention.flash import Key, Output, PerQuery, Query, Value
from moe.attention.mask import Mask
from moe.kernels.attention.blocks import (
    BASE_2,
    UNIT,
    bounds,
    cut,
    filled_marks,
    filled_up,
    full,
    in_blocks,
    loaded,
    marked,
    masked,
    spread,
    visited,
)
from moe.kernels.attention.forward import parts, place_of
from moe.kernels.attention.pipeline import pipelined
from moe.kernels.mosaic import launch, product


class Operands(NamedTuple):
    """Inputs of both kernels, in blocks of `UNIT` tokens of all rows and heads.

    Attributes:
      query, out_gradient, key, value: ``[block, token, width]``.
      slopes: ``[block, 2, query]``: the log-sum-exp of each query's scores, in base 2, and
        `moe.attention.flash.slope_mean`.
      of_query, of_key: marks, as `marked` gives them.
    """

    query: Any
    out_gradient: Any
    key: Any
    value: Any
    slopes: Any
    of_query: Any
    of_key: Any


class Sizes(NamedTuple):
    """Static sizes of the operands.

    Attributes:
      rows, kv_heads: number of rows and of key/value heads.
      group: number of query heads of each key/value head.
      queries, keys: number of blocks of queries and of keys of a row.
      width, wide: width of keys and of values.
      scale: multiplies the scores.
    """

    rows: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    width: int
    wide: int
    scale: float


def attend_gradient(
    query: Query,
    key: Key,
    value: Value,
    mask: Mask,
    log_sum: PerQuery,
    mean: PerQuery,
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
    query, key, value, out_gradient = (filled_up(x, -2) for x in (query, key, value, out_gradient))
    of_query, of_key = filled_marks(mask.query), filled_marks(mask.key)
    units = cut(of_query, UNIT), cut(of_key, UNIT)
    marks = marked(*units, mask.window)
    # In base 2, so that probabilities are exp2(score - log_sum): one instruction per score. One
    # array for both numbers: a block of it is a single copy to shared memory.
    per_query = [filled_up(x, -1).reshape(-1, UNIT) for x in (log_sum * BASE_2, mean)]
    operands = Operands(
        in_blocks(query),
        in_blocks(out_gradient),
        in_blocks(key),
        in_blocks(value),
        jnp.stack(per_query, axis=1),
        *marks,
    )
    queries, keys = (of_row.column.shape[1] for of_row in units)
    sizes = Sizes(rows, kv_heads, group, queries, keys, width, wide, scale)

    # Two tables, as the blocks that a program holds and those that it visits differ in size.
    together = UNIT * queries_of_program(width, wide)
    table = bounds(cut(of_query, together), units[1], mask.window, by_query=True)
    of_queries = _of_queries(operands, table, sizes, dtype, simulated)
    together = UNIT * keys_of_program(width, wide)
    table = bounds(units[0], cut(of_key, together), mask.window, by_query=False)
    of_keys, of_values = _of_keys(operands, table, sizes, dtype, simulated)
    return (
        of_queries.reshape(query.shape)[..., :time, :],
        of_keys.reshape(key.shape)[..., :source, :],
        of_values.reshape(value.shape)[..., :source, :],
    )


def queries_of_program(width: int, wide: int) -> int:
    """Blocks of queries of a program, one for each warpgroup. With two of them and very wide heads,
    shared memory has no space left for two blocks of keys and values."""
    return 2 if width + wide <= 448 else 1


def keys_of_program(width: int, wide: int) -> int:
    """Blocks of keys of a program. With one block for each of two warpgroups, the registers of a
    warpgroup cannot hold both gradients of wide heads. The two then share one block, and each
    computes one of its gradients."""
    return 2 if width + wide <= 256 else 1


def _of_queries(
    operands: Operands, table: Array, sizes: Sizes, dtype: Any, simulated: bool
) -> Array:
    """Gradients of all queries, ``[block, query, head_dim]``."""
    consumers = queries_of_program(sizes.width, sizes.wide)
    num_blocks = sizes.queries // consumers

    def body(target, program, table, *refs):
        *refs, found = refs
        given = Operands(*refs)
        # The order of programs is that of the forward pass, for the same reasons.
        place = place_of(program, sizes.group, num_blocks, sizes.kv_heads)
        visits = visited(table, place.row * num_blocks + place.block)
        first = (place.head * num_blocks + place.block) * consumers
        in_row = (place.row * num_blocks + place.block) * consumers

        def blocks(number):
            at = visits.first + number
            own = place.source * sizes.keys + at
            of_keys = given.of_key.at[place.row * sizes.keys + at]
            return given.key.at[own], given.value.at[own], of_keys

        def compute(warpgroup, held, visit):
            query, out_gradient = (x.at[warpgroup] for x in held)
            # Marks and both numbers per query are loaded once: they stay in registers all along.
            marks = loaded(target, given.of_query.at[in_row + warpgroup], 0)
            log_sum, mean = loaded(target, given.slopes.at[first + warpgroup], 0)

            def step(number, block, total):
                keys, values, of_keys = block
                scores = product(query, target.transposed(keys)) * (sizes.scale * BASE_2)
                clear = visits.is_clear(visits.first + number)
                # Minus infinity is safe here: log_sum is finite, so a hidden score gives exactly 0,
                # also for queries that see no key, whose log_sum is about MASK_VALUE.
                scores = masked(target, scores, marks, of_keys, clear, -jnp.inf, by_query=True)
                powers = jnp.exp2(scores - spread(target, log_sum, scores.shape, 0))
                # p (do v^T - D), the gradient of the scores (`moe.attention.flash`).
                through = product(out_gradient, target.transposed(values))
                slopes = powers * (through - spread(target, mean, scores.shape, 0))
                # As the left operand it stays in registers: no trip through shared memory.
                return target.added(total, slopes.astype(keys.dtype), keys)

            # The scale once per sum, not once per score.
            total = visit(step, full(target, (UNIT, sizes.width), 0.0)) * sizes.scale
            target.store(found.at[first + warpgroup], total.astype(found.dtype))

        own = pl.ds(first, consumers)
        held = given.query.at[own], given.out_gradient.at[own]
        pipelined(target, held, blocks, visits.length, [compute] * consumers)

    heads = sizes.rows * sizes.kv_heads * sizes.group
    shape = jax.ShapeDtypeStruct(operands.query.shape, dtype)
    launched = _launch(
        "attention_grad_query",
        body,
        heads * num_blocks,
        [shape],
        table,
        operands,
        consumers,
        simulated,
    )
    return launched[0]


def _of_keys(
    operands: Operands, table: Array, sizes: Sizes, dtype: Any, simulated: bool
) -> tuple[Array, ...]:
    """Gradients of all keys and values, ``[block, key, width]``."""
    units = keys_of_program(sizes.width, sizes.wide)
    num_blocks = sizes.keys // units

    def body(target, program, table, *refs):
        *refs, of_keys, of_values = refs
        given = Operands(*refs)
        source, block = parts(program, num_blocks)
        row, _ = parts(source, sizes.kv_heads)
        visits = visited(table, row * num_blocks + block)
        first, in_row = program * units, (row * num_blocks + block) * units
        # Blocks are numbered head after head, over all query heads of this key/value head. At least
        # 1, as numbers are divided by it even where no query sees these keys.
        of_head = jnp.maximum(visits.length, 1)

        def block_of(number):
            return visits.first + lax.rem(number, of_head)

        def blocks(number):
            head = source * sizes.group + lax.div(number, of_head)
            at = head * sizes.queries + block_of(number)
            marks = given.of_query.at[row * sizes.queries + block_of(number)]
            return given.query.at[at], given.out_gradient.at[at], given.slopes.at[at], marks

        def compute(warpgroup, held, visit, gradients=(True, True)):
            # With one unit, both warpgroups work on it, and each computes one gradient.
            unit = warpgroup if units > 1 else 0
            keys, values = (x.at[unit] for x in held)
            marks = loaded(target, given.of_key.at[in_row + unit], 0)

            def step(number, block, totals):
                query, out_gradient, slopes, of_query = block

                # Loaded where it is used: held from the start, both numbers per query would take
                # registers that the sums need.
                def slope(number):
                    return spread(target, target.load(slopes.at[number], 1), (UNIT, UNIT), 1)

                # Keys are the rows: the transposed probabilities are then the left operand of the
                # products below, straight from registers.
                scores = product(keys, target.transposed(query)) * (sizes.scale * BASE_2)
                clear = visits.is_clear(block_of(number))
                scores = masked(target, scores, marks, of_query, clear, -jnp.inf, by_query=False)
                powers = jnp.exp2(scores - slope(0))
                added = []
                # dv = p^T do needs no product with values; dk = scale ds^T q does.
                if gradients[1]:
                    added.append((powers, out_gradient))
                if gradients[0]:
                    through = product(values, target.transposed(out_gradient))
                    added.append((powers * (through - slope(1)), query))
                return tuple(
                    target.added(total, left.astype(query.dtype), right)
                    for total, (left, right) in zip(totals, added, strict=True)
                )

            # Values before keys, in the order in which `step` adds them.
            ends = (of_values, sizes.wide, 1.0), (of_keys, sizes.width, sizes.scale)
            ends = [one for one, wanted in zip(ends, reversed(gradients), strict=True) if wanted]
            totals = visit(step, tuple(full(target, (UNIT, width), 0.0) for _, width, _ in ends))
            for (out, _, factor), total in zip(ends, totals, strict=True):
                target.store(out.at[first + unit], (total * factor).astype(out.dtype))

        consumers = [compute] * 2
        if units == 1:
            # (keys, values): the first warpgroup takes values, the second keys.
            each = (False, True), (True, False)
            consumers = [partial(compute, gradients=one) for one in each]
        own = pl.ds(first, units)
        held = given.key.at[own], given.value.at[own]
        pipelined(target, held, blocks, visits.length * sizes.group, consumers)

    shapes = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (operands.key, operands.value)]
    programs = sizes.rows * sizes.kv_heads * num_blocks
    return _launch(
        "attention_grad_key_value", body, programs, shapes, table, operands, 2, simulated
    )


def _launch(
    name: str,
    body: Callable[..., None],
    programs: int,
    shapes: list[jax.ShapeDtypeStruct],
    table: Array,
    operands: Operands,
    consumers: int,
    simulated: bool,
) -> tuple[Array, ...]:
    return launch(
        body,
        programs,
        shapes,
        [table.reshape(-1), *operands],
        operation="the gradient of attention",
        name=name,
        threads=consumers + 1,
        approximate=True,
        simulated=simulated,
    )
