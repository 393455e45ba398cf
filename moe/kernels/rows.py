"""Gather of rows into slots, and weighted sum of a row's slots: kernels bound by memory bandwidth.

A program is one warpgroup, which moves whole rows in pieces of 16 bytes per thread; many programs
in flight keep memory busy. Every element is written once: there are no atomics.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from moe.kernels.choice import call_implementation
from moe.kernels.mosaic import LANES, Target, broadcast_condition, launch, loop_over_row
from moe.ops.sorting import take_rows

SWEPT_SLOTS = 64
"""Slots that one program searches for empty ones."""


def take(
    x: Shaped[Array, "row *rest"],
    source: Int[Array, "slot"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "slot *rest"]:
    """Gathers ``x[source]``, zeros where the index is past the end. It defines no gradient."""
    return call_implementation(
        implementation,
        take_rows,
        _take_kernel,
        (x, source),
        operation="take",
        obstacle=_obstacle(x) or _empty_obstacle(source),
    )


def combine(
    rows: Float[Array, "slot *rest"],
    slots: Int[Array, "row k"],
    probs: Float[Array, "row k"] | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "row *rest"]:
    """Computes ``sum_j probs_j rows[slots_j]`` in float32, in the order of `slots`, and rounds it
    to `dtype`.

    A slot past the end adds nothing, whatever its prob is; `probs` of None are 1. It defines no
    gradient.
    """
    operands = (rows, slots) if probs is None else (rows, slots, probs)
    return call_implementation(
        implementation,
        partial(_combine_plain, dtype=dtype),
        partial(_combine_kernel, dtype=dtype),
        operands,
        operation="combine",
        obstacle=_obstacle(rows) or _empty_obstacle(slots),
    )


def combine_gradients(
    rows: Float[Array, "slot width"],
    gradient: Float[Array, "row width"],
    slots: Int[Array, "row k"],
    assignments: Int[Array, "slot"],
    probs: Float[Array, "row k"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "slot width"], Float[Array, "row k"]]:
    """Gradients of `combine`: of the rows, in their dtype, and of the probs, float32.

    Args:
      assignments: ``row * k + column`` of each slot, past the end for an empty one; the inverse of
        `slots`.
    """
    return call_implementation(
        implementation,
        _gradients_plain,
        _gradients_kernel,
        (rows, gradient, slots, assignments, probs),
        operation="combine_gradients",
        obstacle=_obstacle(rows) or _empty_obstacle(slots) or _empty_obstacle(assignments),
    )


def unsupported_width(width: int) -> str | None:
    """The rule for the number of elements of a row, if this one breaks it."""
    return f"needs a multiple of {LANES}" if width % LANES else None


def _obstacle(x: Array) -> str | None:
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float32)
    if x.ndim != 2 or unsupported_width(x.shape[1]) or not x.size:
        return (
            f"{x.shape[0]} rows of shape {x.shape[1:]} (needs one row or more, and a multiple of "
            f"{LANES} elements); use None."
        )
    if x.dtype not in dtypes:
        return f"rows of {x.dtype} (needs bfloat16, float16 or float32); use None."
    return None


def _empty_obstacle(indices: Array) -> str | None:
    return None if indices.size else f"empty indices of shape {indices.shape}; use None."


def _take_kernel(x: Array, source: Array, *, interpreted: bool) -> Array:
    num_slots, (height, width) = source.shape[0], x.shape
    # A few kilobytes for each program, for any width: narrow rows are moved several at a time.
    slots_per_program = max(1, min(8, 2048 // width))

    def body(target: Target, program, x, source, out):
        # Beyond the last slot the last one is written again, with the same values.
        slots_here = [
            jnp.minimum(program * slots_per_program + n, num_slots - 1)
            for n in range(slots_per_program)
        ]
        rows_here = [source[slot] for slot in slots_here]

        def move(chunks, _):
            loaded = []
            # All loads before all stores, so that they are in flight together.
            for slot, row in zip(slots_here, rows_here, strict=True):
                # An index past the end reads the last row, and a select replaces it by zeros: a
                # branch would wait for the index before it could load.
                safe = jnp.minimum(row, height - 1)
                for first, length in chunks:
                    values = target.strided(x[safe, pl.ds(first, length)])
                    zeros = target.strided(jnp.zeros((length,), x.dtype))
                    here = slot, pl.ds(first, length)
                    loaded.append(
                        (
                            here,
                            jnp.where(broadcast_condition(row < height, (length,)), values, zeros),
                        )
                    )
            for here, values in loaded:
                out[here] = values

        loop_over_row(width, 8 * x.dtype.itemsize, move)

    outputs = [jax.ShapeDtypeStruct((num_slots, width), x.dtype)]
    operands = [x, source.astype(jnp.int32)]
    programs = -(-num_slots // slots_per_program)
    return launch(
        body,
        programs,
        outputs,
        operands,
        operation="take",
        name="take_rows",
        interpreted=interpreted,
    )[0]


def _combine_plain(
    rows: Array, slots: Array, probs: Array | None = None, *, dtype: DTypeLike
) -> Array:
    total = jnp.zeros((slots.shape[0], *rows.shape[1:]), jnp.float32)
    # A loop over columns: gathered in one operation they would be as many float32 rows as there
    # are slots, where the compiler does not fuse the gather into the sum.
    for column in range(slots.shape[1]):
        values = take_rows(rows, slots[:, column]).astype(jnp.float32)
        total = total + (values if probs is None else values * probs[:, column, None])
    return total.astype(dtype)


def _combine_kernel(
    rows: Array,
    slots: Array,
    probs: Array | None = None,
    *,
    dtype: DTypeLike,
    interpreted: bool,
) -> Array:
    (num_rows, k), (height, width) = slots.shape, rows.shape

    # A program for each row: it reads the row's slots and writes their sum, so the order of the
    # sum is fixed.
    def body(target: Target, row, rows, slots, *refs):
        out = refs[-1]
        row_slots = [slots[row * k + column] for column in range(k)]
        row_probs = None if probs is None else [refs[0][row * k + column] for column in range(k)]

        def add(chunks, _):
            for first, length in chunks:
                total = target.strided(jnp.zeros((length,), jnp.float32))
                for column in range(k):
                    values = _load_chunk(target, rows, row_slots[column], height, first, length)
                    total = total + (values if row_probs is None else values * row_probs[column])
                out[row, pl.ds(first, length)] = total.astype(out.dtype)

        loop_over_row(width, 8 * rows.dtype.itemsize, add)

    outputs = [jax.ShapeDtypeStruct((num_rows, width), dtype)]
    operands = [rows, slots.astype(jnp.int32).reshape(-1)]
    if probs is not None:
        operands.append(probs.astype(jnp.float32).reshape(-1))
    return launch(
        body,
        num_rows,
        outputs,
        operands,
        operation="combine",
        name="combine_rows",
        interpreted=interpreted,
    )[0]


def _load_chunk(target: Target, rows, slot, height: int, first, length: int) -> Array:
    """Loads a chunk of a row in float32, zeros where its index is past the end."""
    values = target.strided(rows[jnp.minimum(slot, height - 1), pl.ds(first, length)])
    zeros = target.strided(jnp.zeros((length,), jnp.float32))
    return jnp.where(
        broadcast_condition(slot < height, (length,)), values.astype(jnp.float32), zeros
    )


def _gradients_plain(
    rows: Array, gradient: Array, slots: Array, assignments: Array, probs: Array
) -> tuple[Array, Array]:
    wide = gradient.astype(jnp.float32)
    slot_rows = take_rows(rows, slots).astype(jnp.float32)
    exact = lax.Precision.HIGHEST
    grad_probs = jnp.einsum("nd,nkd->nk", wide, slot_rows, precision=exact)
    prob = take_rows(probs.reshape(-1), assignments).astype(jnp.float32)
    grad_rows = prob[:, None] * take_rows(wide, assignments // slots.shape[1])
    return grad_rows.astype(rows.dtype), grad_probs


def _gradients_kernel(
    rows: Array,
    gradient: Array,
    slots: Array,
    assignments: Array,
    probs: Array,
    *,
    interpreted: bool,
) -> tuple[Array, Array]:
    (num_rows, k), (height, width) = slots.shape, rows.shape
    bits = 8 * rows.dtype.itemsize

    # The gradients of a row's slots and of its probs need the same output gradient: one program
    # reads it once for all.
    def differentiate_row(target: Target, row, refs):
        rows, gradient, slots, _, probs, grad_rows, grad_probs = refs
        row_slots = [slots[row * k + column] for column in range(k)]
        row_probs = [probs[row * k + column] for column in range(k)]

        def step(chunks, sums):
            grad_chunks = [
                target.strided(gradient[row, pl.ds(*chunk)]).astype(jnp.float32) for chunk in chunks
            ]
            sums = list(sums)
            for column in range(k):
                # Chunks of equal length are added elementwise first: a sum over threads takes a
                # barrier, and there is then one for each length instead of one for each chunk.
                products = {}
                for (first, length), grad_chunk in zip(chunks, grad_chunks, strict=True):
                    product = grad_chunk * _load_chunk(
                        target, rows, row_slots[column], height, first, length
                    )
                    products[length] = products[length] + product if length in products else product
                sums[column] += sum(jnp.sum(product) for product in products.values())

                # A store needs a branch: there is no row that could be written instead.
                @pl.when(row_slots[column] < height)
                def _(column=column):
                    for chunk, grad_chunk in zip(chunks, grad_chunks, strict=True):
                        grad_row = grad_chunk * row_probs[column]
                        grad_rows[row_slots[column], pl.ds(*chunk)] = grad_row.astype(
                            grad_rows.dtype
                        )

            return tuple(sums)

        sums = loop_over_row(width, bits, step, (jnp.float32(0),) * k)
        for column in range(k):
            grad_probs[row * k + column] = sums[column]

    # Outputs are uninitialised memory, and no row writes to an empty slot: these are set to zero.
    def clear_empty_slots(target: Target, first, refs):
        *_, assignments, _, grad_rows, _ = refs

        def clear(index, carry):
            slot = jnp.minimum(first + index, height - 1)

            def zero(chunks, _):
                for first, length in chunks:
                    zeros = target.strided(jnp.zeros((length,), grad_rows.dtype))
                    grad_rows[slot, pl.ds(first, length)] = zeros

            @pl.when(assignments[slot] >= num_rows * k)
            def _():
                loop_over_row(width, bits, zero)

            return carry

        lax.fori_loop(0, SWEPT_SLOTS, clear, None)

    # Both in one launch: programs after those of the rows sweep the slots.
    def body(target: Target, program, *refs):
        @pl.when(program < num_rows)
        def _():
            differentiate_row(target, program, refs)

        @pl.when(program >= num_rows)
        def _():
            clear_empty_slots(target, (program - num_rows) * SWEPT_SLOTS, refs)

    outputs = [
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        jax.ShapeDtypeStruct((num_rows * k,), jnp.float32),
    ]
    flat = (slots.astype(jnp.int32), assignments.astype(jnp.int32), probs.astype(jnp.float32))
    operands = [rows, gradient, *(array.reshape(-1) for array in flat)]
    grad_rows, grad_probs = launch(
        body,
        num_rows + -(-height // SWEPT_SLOTS),
        outputs,
        operands,
        operation="combine_gradients",
        interpreted=interpreted,
    )
    return grad_rows, grad_probs.reshape(slots.shape)
