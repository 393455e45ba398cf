"""Gather of rows into slots, and weighted sum of a row's copies: kernels bound by memory bandwidth.

A program is one warpgroup, which moves whole rows in pieces of 16 bytes per thread; many programs
in flight keep memory busy. Every element is written once: there are no atomics.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from moe.kernels.choice import by_name
from moe.kernels.mosaic import LANES, Target, along, flag, launch

SWEPT = 64
"""Slots that one program searches for empty ones."""


def take(
    x: Shaped[Array, "row *rest"],
    source: Int[Array, "slot"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "slot *rest"]:
    """Gathers ``x[source]``, zeros where the index is past the end. It defines no gradient."""
    return by_name(
        implementation,
        _take_plain,
        _take_kernel,
        (x, source),
        operation="take",
        obstacle=_obstacle(x) or _empty(source),
    )


def combine(
    rows: Float[Array, "slot *rest"],
    places: Int[Array, "row copies"],
    probs: Float[Array, "row copies"] | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Float[Array, "row *rest"]:
    """Computes ``sum_j probs_j rows[places_j]`` in float32, in the order of `places`, and rounds it
    to `dtype`.

    A place past the end adds nothing, whatever its prob is; `probs` of None are 1. It defines no
    gradient.
    """
    operands = (rows, places) if probs is None else (rows, places, probs)
    return by_name(
        implementation,
        partial(_combine_plain, dtype=dtype),
        partial(_combine_kernel, dtype=dtype),
        operands,
        operation="combine",
        obstacle=_obstacle(rows) or _empty(places),
    )


def combine_gradients(
    rows: Float[Array, "slot width"],
    gradient: Float[Array, "row width"],
    places: Int[Array, "row copies"],
    choices: Int[Array, "slot"],
    probs: Float[Array, "row copies"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "slot width"], Float[Array, "row copies"]]:
    """Gradients of `combine`: of the rows, in their dtype, and of the probs, float32.

    Args:
      choices: ``row * copies + copy`` of each slot, past the end for an empty one; the inverse of
        `places`.
    """
    return by_name(
        implementation,
        _gradients_plain,
        _gradients_kernel,
        (rows, gradient, places, choices, probs),
        operation="combine_gradients",
        obstacle=_obstacle(rows) or _empty(places) or _empty(choices),
    )


def _obstacle(x: Array) -> str | None:
    dtypes = (jnp.bfloat16, jnp.float16, jnp.float32)
    if x.ndim != 2 or x.shape[1] % LANES or not x.size:
        return (
            f"rows of shape {x.shape[1:]}, {x.shape[0]} of them, where it moves one or more of a "
            f"multiple of {LANES} numbers; use None."
        )
    if x.dtype not in dtypes:
        return f"rows of {x.dtype} where it moves bfloat16, float16 or float32; use None."
    return None


def _empty(indices: Array) -> str | None:
    return None if indices.size else f"indices of shape {indices.shape}, none at all; use None."


def _take_plain(x: Array, source: Array) -> Array:
    return x.at[source].get(mode="fill", fill_value=0)


def _take_kernel(x: Array, source: Array, *, interpreted: bool) -> Array:
    slots, (height, width) = source.shape[0], x.shape
    # A few kilobytes for each program, for any width: narrow rows are moved several at a time.
    together = max(1, min(8, 2048 // width))

    def body(target: Target, program, x, source, out):
        # Beyond the last slot the last one is written again, with the same values.
        slots_here = [jnp.minimum(program * together + n, slots - 1) for n in range(together)]
        rows_here = [source[slot] for slot in slots_here]

        def move(parts, _):
            loaded = []
            # All loads before all stores, so that they are in flight together.
            for slot, row in zip(slots_here, rows_here, strict=True):
                # An index past the end reads the last row, and a select replaces it by zeros: a
                # branch would wait for the index before it could load.
                safe = jnp.minimum(row, height - 1)
                for first, length in parts:
                    piece = target.strided(x[safe, pl.ds(first, length)])
                    nothing = target.strided(jnp.zeros((length,), x.dtype))
                    here = slot, pl.ds(first, length)
                    loaded.append((here, jnp.where(flag(row < height, (length,)), piece, nothing)))
            for here, piece in loaded:
                out[here] = piece

        along(width, 8 * x.dtype.itemsize, move)

    outputs = [jax.ShapeDtypeStruct((slots, width), x.dtype)]
    operands = [x, source.astype(jnp.int32)]
    programs = -(-slots // together)
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
    rows: Array, places: Array, probs: Array | None = None, *, dtype: DTypeLike
) -> Array:
    total = jnp.zeros((places.shape[0], *rows.shape[1:]), jnp.float32)
    # A loop over copies: gathered in one operation they would be as many float32 rows as there are
    # places, where the compiler does not fuse the gather into the sum.
    for copy in range(places.shape[1]):
        piece = _take_plain(rows, places[:, copy]).astype(jnp.float32)
        total = total + (piece if probs is None else piece * probs[:, copy, None])
    return total.astype(dtype)


def _combine_kernel(
    rows: Array,
    places: Array,
    probs: Array | None = None,
    *,
    dtype: DTypeLike,
    interpreted: bool,
) -> Array:
    (number, copies), (height, width) = places.shape, rows.shape

    # A program for each row: it reads the row's copies and writes their sum, so the order of the
    # sum is fixed.
    def body(target: Target, row, rows, places, *refs):
        out = refs[-1]
        place = [places[row * copies + copy] for copy in range(copies)]
        prob = None if probs is None else [refs[0][row * copies + copy] for copy in range(copies)]

        def add(parts, _):
            for first, length in parts:
                total = target.strided(jnp.zeros((length,), jnp.float32))
                for copy in range(copies):
                    piece = _piece(target, rows, place[copy], height, first, length)
                    total = total + (piece if prob is None else piece * prob[copy])
                out[row, pl.ds(first, length)] = total.astype(out.dtype)

        along(width, 8 * rows.dtype.itemsize, add)

    outputs = [jax.ShapeDtypeStruct((number, width), dtype)]
    operands = [rows, places.astype(jnp.int32).reshape(-1)]
    if probs is not None:
        operands.append(probs.astype(jnp.float32).reshape(-1))
    return launch(
        body,
        number,
        outputs,
        operands,
        operation="combine",
        name="combine_rows",
        interpreted=interpreted,
    )[0]


def _piece(target: Target, rows, place, height: int, first, length: int) -> Array:
    """Loads a part of a row in float32, zeros where its index is past the end."""
    piece = target.strided(rows[jnp.minimum(place, height - 1), pl.ds(first, length)])
    nothing = target.strided(jnp.zeros((length,), jnp.float32))
    return jnp.where(flag(place < height, (length,)), piece.astype(jnp.float32), nothing)


def _gradients_plain(
    rows: Array, gradient: Array, places: Array, choices: Array, probs: Array
) -> tuple[Array, Array]:
    wide = gradient.astype(jnp.float32)
    copies = _take_plain(rows, places).astype(jnp.float32)
    exact = lax.Precision.HIGHEST
    of_probs = jnp.einsum("nd,nkd->nk", wide, copies, precision=exact)
    prob = _take_plain(probs.reshape(-1), choices).astype(jnp.float32)
    of_rows = prob[:, None] * _take_plain(wide, choices // places.shape[1])
    return of_rows.astype(rows.dtype), of_probs


def _gradients_kernel(
    rows: Array,
    gradient: Array,
    places: Array,
    choices: Array,
    probs: Array,
    *,
    interpreted: bool,
) -> tuple[Array, Array]:
    (number, copies), (height, width) = places.shape, rows.shape
    bits = 8 * rows.dtype.itemsize

    # The gradients of a row's copies and of its probs need the same output gradient: one program
    # reads it once for all.
    def of_a_row(target: Target, row, refs):
        rows, gradient, places, _, probs, of_rows, of_probs = refs
        place = [places[row * copies + copy] for copy in range(copies)]
        prob = [probs[row * copies + copy] for copy in range(copies)]

        def step(parts, sums):
            pulled = [
                target.strided(gradient[row, pl.ds(*part)]).astype(jnp.float32) for part in parts
            ]
            sums = list(sums)
            for copy in range(copies):
                # Parts of equal length are added elementwise first: a sum over threads takes a
                # barrier, and there is then one for each length instead of one for each part.
                products = {}
                for (first, length), pull in zip(parts, pulled, strict=True):
                    product = pull * _piece(target, rows, place[copy], height, first, length)
                    products[length] = products[length] + product if length in products else product
                sums[copy] += sum(jnp.sum(product) for product in products.values())

                # A store needs a branch: there is no row that could be written in its place.
                @pl.when(place[copy] < height)
                def _(copy=copy):
                    for part, pull in zip(parts, pulled, strict=True):
                        passed = pull * prob[copy]
                        of_rows[place[copy], pl.ds(*part)] = passed.astype(of_rows.dtype)

            return tuple(sums)

        sums = along(width, bits, step, (jnp.float32(0),) * copies)
        for copy in range(copies):
            of_probs[row * copies + copy] = sums[copy]

    # Outputs are uninitialised memory, and no row writes to an empty slot: these are set to zero.
    def of_empty_slots(target: Target, first, refs):
        *_, choices, _, of_rows, _ = refs

        def clear(index, nothing):
            slot = jnp.minimum(first + index, height - 1)

            def zero(parts, _):
                for first, length in parts:
                    zeros = target.strided(jnp.zeros((length,), of_rows.dtype))
                    of_rows[slot, pl.ds(first, length)] = zeros

            @pl.when(choices[slot] >= number * copies)
            def _():
                along(width, bits, zero)

            return nothing

        lax.fori_loop(0, SWEPT, clear, None)

    # Both in one launch: programs after those of the rows sweep the slots.
    def body(target: Target, program, *refs):
        @pl.when(program < number)
        def _():
            of_a_row(target, program, refs)

        @pl.when(program >= number)
        def _():
            of_empty_slots(target, (program - number) * SWEPT, refs)

    outputs = [
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        jax.ShapeDtypeStruct((number * copies,), jnp.float32),
    ]
    flat = (places.astype(jnp.int32), choices.astype(jnp.int32), probs.astype(jnp.float32))
    operands = [rows, gradient, *(array.reshape(-1) for array in flat)]
    of_rows, of_probs = launch(
        body,
        number + -(-height // SWEPT),
        outputs,
        operands,
        operation="combine_gradients",
        interpreted=interpreted,
    )
    return of_rows, of_probs.reshape(places.shape)
