"""Gather of rows into slots, and sum of a row's slots: kernels bound by memory bandwidth.

A program is one warpgroup, which moves whole rows in pieces of 16 bytes per thread; many programs
in flight keep memory busy. Every element is written once: there are no atomics.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from moe.kernels.choice import call_implementation
from moe.kernels.mosaic import LANES, Target, launch, loop_over_row
from moe.ops.sorting import take_rows


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
        obstacle=_obstacle(x, source),
    )


def combine(
    rows: Float[Array, "slot *rest"],
    slots: Int[Array, "row k"],
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "row *rest"]:
    """Computes ``sum_j rows[slots_j]`` in float32, in the order of `slots`, and rounds it to
    `dtype`.

    A slot past the end adds nothing. It defines no gradient.
    """
    return call_implementation(
        implementation,
        partial(_combine_plain, dtype=dtype),
        partial(_combine_kernel, dtype=dtype),
        (rows, slots),
        operation="combine",
        obstacle=_obstacle(rows, slots),
    )


def unsupported_width(width: int) -> str | None:
    """The rule for the number of elements of a row, if this one breaks it."""
    return f"needs a multiple of {LANES}" if width % LANES else None


def _obstacle(x: Array, indices: Array) -> str | None:
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float32)
    if x.ndim != 2 or unsupported_width(x.shape[1]) or not x.size:
        return (
            f"{x.shape[0]} rows of shape {x.shape[1:]} (needs one row or more, and a multiple of "
            f"{LANES} elements); use None."
        )
    if x.dtype not in dtypes:
        return f"rows of {x.dtype} (needs bfloat16, float16 or float32); use None."
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

        def move(chunks):
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
                    loaded.append((here, _select(row < height, values, zeros)))
            for here, values in loaded:
                out[here] = values

        loop_over_row(width, 8 * x.dtype.itemsize, move)

    return launch(
        body,
        -(-num_slots // slots_per_program),
        [jax.ShapeDtypeStruct((num_slots, width), x.dtype)],
        [x, source.astype(jnp.int32)],
        operation="take",
        name="take_rows",
        interpreted=interpreted,
    )[0]


def _combine_plain(rows: Array, slots: Array, *, dtype: DTypeLike) -> Array:
    total = jnp.zeros((slots.shape[0], *rows.shape[1:]), jnp.float32)
    # A loop over columns: gathered in one operation they would be as many float32 rows as there
    # are slots, where the compiler does not fuse the gather into the sum.
    for column in range(slots.shape[1]):
        total = total + take_rows(rows, slots[:, column]).astype(jnp.float32)
    return total.astype(dtype)


def _combine_kernel(rows: Array, slots: Array, *, dtype: DTypeLike, interpreted: bool) -> Array:
    (num_rows, k), (height, width) = slots.shape, rows.shape

    # A program for each row: it reads the row's slots and writes their sum, so the order of the
    # sum is fixed.
    def body(target: Target, row, rows, slots, out):
        row_slots = [slots[row * k + column] for column in range(k)]

        def add(chunks):
            for first, length in chunks:
                total = target.strided(jnp.zeros((length,), jnp.float32))
                for slot in row_slots:
                    total = total + _load_chunk(target, rows, slot, height, first, length)
                out[row, pl.ds(first, length)] = total.astype(out.dtype)

        loop_over_row(width, 8 * rows.dtype.itemsize, add)

    return launch(
        body,
        num_rows,
        [jax.ShapeDtypeStruct((num_rows, width), dtype)],
        [rows, slots.astype(jnp.int32).reshape(-1)],
        operation="combine",
        name="combine_rows",
        interpreted=interpreted,
    )[0]


def _load_chunk(target: Target, rows, slot, height: int, first, length: int) -> Array:
    """Loads a chunk of a row in float32, zeros where its index is past the end."""
    values = target.strided(rows[jnp.minimum(slot, height - 1), pl.ds(first, length)])
    zeros = target.strided(jnp.zeros((length,), jnp.float32))
    return _select(slot < height, values.astype(jnp.float32), zeros)


def _select(condition: Array, values: Array, others: Array) -> Array:
    """`jnp.where` by a scalar: a warpgroup's select takes vectors only."""
    return jnp.where(jnp.broadcast_to(condition, values.shape), values, others)
