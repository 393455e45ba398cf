"""Grouped gate/up GEMM of experts with SwiGLU and gate weights fused into its epilogue, and the
fused backward pass.

``hidden[r] = silu(x[r] G_e) * x[r] U_e * p_r`` for a row of expert e: a program multiplies a tile
of rows with the same columns of gate and of up, holds both sums in registers and writes hidden
units, so that the activation needs no pass over memory of its own. The backward pass does the same
with the gradient of the hidden units.

Rows are in the order of experts, as everywhere in `moe.experts`, or in any order and gathered by
the product itself (`moe.kernels.slices`); so is the output gradient. The down-projection does not
add its rows to those of tokens: a sum by the programs that compute them would need atomics, in an
order that varies, or programs that wait for others. Each row has a slot of its own, and
`moe.kernels.rows.combine` adds them in the order of the expert ids: bitwise identical each time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe.kernels.grouped import (
    Tiles,
    Tiling,
    fitting,
    product_tiles,
    store_rows,
    tiles_of,
    whole_tiles,
)
from moe.kernels.mosaic import Target, launch, mosaic_gpu

FORWARD = Tiling(columns=64)
"""64 columns: two tiles of sums take as many registers as one product with 128 columns."""
BACKWARD = Tiling(columns=64)


def hidden_units(
    rows: Float[Array, "row inner"],
    gate_up: Float[Array, "group inner twice"],
    probs: Float[Array, "slot"],
    sizes: Int[Array, "group"],
    *,
    source: Int[Array, "slot"] | None = None,
    tiling: Tiling = FORWARD,
    simulated: bool = False,
) -> tuple[Float[Array, "slot hidden"], Float[Array, "slot twice"]]:
    """Hidden units of each row and, for the backward pass, its gate/up projection, gate and up side
    by side; zeros for rows of no group.

    Gate and up are rounded to the dtype of the rows before they are used, as they are saved: the
    backward pass starts from the same numbers. The rest is computed in float32 and rounded once.

    Args:
      gate_up: matrix of each group, all columns of gate first.
      probs: gate weight of each row's output, float32.
      source: index of the row of each slot, as in `moe.kernels.grouped.each`.
    """
    num_slots, width = probs.shape[0], gate_up.shape[2] // 2
    height, columns = tiling.rows, fitting(width, tiling.columns)
    given, room = whole_tiles(rows, source, height)
    tiles = tiles_of(sizes, room, height)
    down, across = tiles.group.shape[0], width // columns
    probs = _of_groups(probs, sizes, room, height)

    # Ordering and padding of tiles are those of `moe.kernels.grouped.each`.
    def body(target, program, group, block, first, size, *refs):
        *given, weights, probs, hidden, inward = refs
        tile, column = mosaic_gpu().planar_snake(
            program, (down, across), 1, min(tiling.wide, across)
        )

        @pl.when(size[tile] > 0)
        def _():
            start = block[tile] * height
            found = product_tiles(
                target,
                0,
                (height, columns, tiling),
                (group[tile], block[tile], [column, across + column]),
                given,
                weights,
            )
            # Rounded and widened again: the activation must see what the backward pass will read.
            kept = [one.astype(rows.dtype) for one in found]
            gate, up = (target.tiled(one.astype(jnp.float32)) for one in kept)
            prob = _spread(target, target.load(probs.at[pl.ds(start, height)], 0), gate.shape)

            def store(part, column, out):
                store_rows(part, first[tile], size[tile], start, column, out)

            # silu(gate) = gate sigmoid(gate) = gate / (1 + e^-gate)
            store(gate / (1 + jnp.exp(-gate)) * up * prob, column, hidden)
            store(kept[0], column, inward)
            store(kept[1], across + column, inward)

    hidden, inward = launch(
        body,
        down * across,
        [
            jax.ShapeDtypeStruct((room, width), rows.dtype),
            jax.ShapeDtypeStruct((room, 2 * width), rows.dtype),
        ],
        [*tiles, *given, gate_up, probs],
        operation="hidden_units",
        name="swiglu_forward",
        simulated=simulated,
    )
    return hidden[:num_slots], inward[:num_slots]


def hidden_gradients(
    pull: Float[Array, "row outer"],
    down: Float[Array, "group hidden outer"],
    inward: Float[Array, "slot twice"],
    probs: Float[Array, "slot"],
    sizes: Int[Array, "group"],
    *,
    source: Int[Array, "slot"] | None = None,
    tiling: Tiling = BACKWARD,
    simulated: bool = False,
) -> tuple[Float[Array, "slot twice"], Float[Array, "slot"]]:
    """Gradients of gate and up, side by side in their dtype, and of the gate weights, float32, from
    the output gradient; zeros for rows of no group.

    The gradient of the hidden units, ``pull[r] D_e^T``, is not rounded. That of a gate weight is a
    sum over all hidden units: each program writes its part, and the parts are added in order.

    Args:
      pull: gradient of the down-projection's output.
      down: matrices of the down-projection.
      inward: gate and up, as `hidden_units` gave them.
      source: index of the row of `pull` for each slot, as in `moe.kernels.grouped.each`.
    """
    num_slots, width = inward.shape[0], down.shape[1]
    height, columns = tiling.rows, fitting(width, tiling.columns)
    given, room = whole_tiles(pull, source, height)
    tiles = tiles_of(sizes, room, height)
    below, across = tiles.group.shape[0], width // columns
    probs = _of_groups(probs, sizes, room, height)
    # Whole tiles are read, so the array must not end before them; rows of other groups are computed
    # and not written.
    inward = jnp.pad(inward, ((0, probs.shape[0] - num_slots), (0, 0)))

    def body(target, program, group, block, first, size, *refs):
        *given, down, inward, probs, out, of_probs = refs
        tile, column = mosaic_gpu().planar_snake(
            program, (below, across), 1, min(tiling.wide, across)
        )

        @pl.when(size[tile] > 0)
        def _():
            start = block[tile] * height
            (of_hidden,) = product_tiles(
                target,
                1,
                (height, columns, tiling),
                (group[tile], block[tile], [column]),
                given,
                down,
            )

            # Gate and up of these columns are half the width of the array apart.
            def half(number):
                at = pl.ds(start, height), pl.ds((number * across + column) * columns, columns)
                return target.load(inward.at[at]).astype(jnp.float32)

            gate, up = half(0), half(1)
            prob = _spread(target, target.load(probs.at[pl.ds(start, height)], 0), gate.shape)
            slope = 1 / (1 + jnp.exp(-gate))
            silu = gate * slope
            # Before the gate weight multiplies: the gradient of that weight does not contain it.
            # One sum per program and row, in a place of its own: no atomics.
            total = target.tiled(jnp.sum(of_hidden * silu * up, axis=1))
            target.store(of_probs.at[pl.ds((tile * across + column) * height, height)], total)
            of_hidden = of_hidden * prob

            def store(part, column, out):
                store_rows(part, first[tile], size[tile], start, column, out)

            # d silu(g) / dg = s + silu(g) (1 - s), with s = sigmoid(g)
            store(of_hidden * up * (slope + silu * (1 - slope)), column, out)
            store(of_hidden * silu, across + column, out)

    found, of_tiles = launch(
        body,
        below * across,
        [
            jax.ShapeDtypeStruct((room, 2 * width), inward.dtype),
            jax.ShapeDtypeStruct((below * across * height,), jnp.float32),
        ],
        [*tiles, *given, down, inward, probs],
        operation="hidden_gradients",
        name="swiglu_backward",
        simulated=simulated,
    )
    return found[:num_slots], _of_rows(of_tiles.reshape(below, across, height), tiles, num_slots)


def _of_groups(probs: Array, sizes: Array, num_rows: int, height: int) -> Array:
    """Gate weights padded to whole tiles, 0 for rows of no group, so that their contents have no
    effect."""
    known = jnp.arange(probs.shape[0]) < jnp.sum(sizes)
    probs = jnp.where(known, probs.astype(jnp.float32), 0.0)
    return jnp.pad(probs, (0, -(-num_rows // height) * height - probs.shape[0]))


def _spread(target: Target, vector: Array, shape: tuple[int, ...]) -> Array:
    return target.tiled(lax.broadcast_in_dim(vector, shape, (0,)))


def _of_rows(of_tiles: Array, tiles: Tiles, num_rows: int) -> Array:
    """Sum of each row, from the partial sums that the programs of its tile wrote, added in order.

    A tile has sums for all rows of its block; those of other groups are dropped.
    """
    within = jnp.arange(of_tiles.shape[2])[None]
    first, stop = tiles.first[:, None], (tiles.first + tiles.size)[:, None]
    row = tiles.block[:, None] * of_tiles.shape[2] + within
    row = jnp.where((within >= first) & (within < stop), row, num_rows)
    # No row is two tiles' own, so that this scatter needs no atomics.
    return jnp.zeros(num_rows).at[row].set(jnp.sum(of_tiles, axis=1), mode="drop")
