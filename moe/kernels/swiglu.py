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
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moe.kernels.grouped import (
    Tiles,
    Tiling,
    fit_columns,
    pad_to_tiles,
    plan_tiles,
    product_tiles,
    store_rows,
)
from moe.kernels.mosaic import launch, mosaic_gpu

FORWARD = Tiling(columns=64)
"""64 columns: two tiles of sums take as many registers as one product with 128 columns."""
BACKWARD = Tiling(columns=64)


def hidden_units(
    rows: Float[Array, "row inner"],
    gate_up_weights: Float[Array, "group inner twice"],
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
      gate_up_weights: matrix of each group, all columns of gate first.
      probs: gate weight of each row's output, float32.
      source: index of the row of each slot, as in `moe.kernels.grouped.multiply_rows`.
    """
    num_slots, width = probs.shape[0], gate_up_weights.shape[2] // 2
    height, tiling = tiling.rows, fit_columns(tiling, width)
    row_sources, num_padded = pad_to_tiles(rows, source, height)
    tiles = plan_tiles(sizes, num_padded, height)
    num_tiles, across = tiles.group.shape[0], width // tiling.columns
    probs = _pad_probs(probs, sizes, num_padded, height)

    # Ordering and padding of tiles are those of `moe.kernels.grouped.multiply_rows`.
    def body(target, program, group, block, first, size, *refs):
        *row_refs, weights, probs, hidden, gate_up = refs
        tile, column = mosaic_gpu().planar_snake(
            program, (num_tiles, across), 1, min(tiling.wide, across)
        )

        @pl.when(size[tile] > 0)
        def _():
            start = block[tile] * height
            where = group[tile], block[tile], [column, across + column]
            products = product_tiles(target, 0, row_refs, weights, tiling, *where)
            # Rounded and widened again: the activation must see what the backward pass will read.
            rounded = [values.astype(rows.dtype) for values in products]
            gate, up = (target.tiled(values.astype(jnp.float32)) for values in rounded)
            prob = target.broadcast(target.load(probs.at[pl.ds(start, height)], 0), gate.shape)

            def store(values_tile, column, out):
                store_rows(values_tile, first[tile], size[tile], start, column, out)

            # silu(gate) = gate sigmoid(gate) = gate / (1 + e^-gate)
            store(gate / (1 + jnp.exp(-gate)) * up * prob, column, hidden)
            store(rounded[0], column, gate_up)
            store(rounded[1], across + column, gate_up)

    hidden, gate_up = launch(
        body,
        num_tiles * across,
        [
            jax.ShapeDtypeStruct((num_padded, width), rows.dtype),
            jax.ShapeDtypeStruct((num_padded, 2 * width), rows.dtype),
        ],
        [*tiles, *row_sources, gate_up_weights, probs],
        operation="hidden_units",
        name="swiglu_forward",
        simulated=simulated,
    )
    return hidden[:num_slots], gate_up[:num_slots]


def hidden_gradients(
    grad_out: Float[Array, "row outer"],
    down_weights: Float[Array, "group hidden outer"],
    gate_up: Float[Array, "slot twice"],
    probs: Float[Array, "slot"],
    sizes: Int[Array, "group"],
    *,
    source: Int[Array, "slot"] | None = None,
    tiling: Tiling = BACKWARD,
    simulated: bool = False,
) -> tuple[Float[Array, "slot twice"], Float[Array, "slot"]]:
    """Gradients of gate and up, side by side in their dtype, and of the gate weights, float32, from
    the output gradient; zeros for rows of no group.

    The gradient of the hidden units, ``grad_out[r] D_e^T``, is not rounded. That of a gate weight
    is a sum over all hidden units: each program writes a partial sum, and these are added in order.

    Args:
      grad_out: gradient of the down-projection's output.
      down_weights: matrices of the down-projection.
      gate_up: gate and up, as `hidden_units` gave them.
      source: index of the row of `grad_out` for each slot, as in
        `moe.kernels.grouped.multiply_rows`.
    """
    num_slots, width = gate_up.shape[0], down_weights.shape[1]
    tiling = fit_columns(tiling, width)
    height, columns = tiling.rows, tiling.columns
    row_sources, num_padded = pad_to_tiles(grad_out, source, height)
    tiles = plan_tiles(sizes, num_padded, height)
    below, across = tiles.group.shape[0], width // columns
    probs = _pad_probs(probs, sizes, num_padded, height)
    # Whole tiles are read, so the array must not end before them; rows of other groups are computed
    # and not written.
    gate_up = jnp.pad(gate_up, ((0, probs.shape[0] - num_slots), (0, 0)))

    def body(target, program, group, block, first, size, *refs):
        *row_refs, down_weights, gate_up, probs, grad_gate_up_ref, tile_sums_ref = refs
        tile, column = mosaic_gpu().planar_snake(
            program, (below, across), 1, min(tiling.wide, across)
        )

        @pl.when(size[tile] > 0)
        def _():
            start = block[tile] * height
            (grad_hidden,) = product_tiles(
                target, 1, row_refs, down_weights, tiling, group[tile], block[tile], [column]
            )

            # Gate and up of these columns are half the width of the array apart.
            def load_half(index):
                half = pl.ds((index * across + column) * columns, columns)
                return target.load(gate_up.at[pl.ds(start, height), half]).astype(jnp.float32)

            # In this order no more than three matrices are in registers at a time.
            gate = load_half(0)
            slope = 1 / (1 + jnp.exp(-gate))
            silu = gate * slope
            # d silu(g) / dg = s + silu(g) (1 - s), with s = sigmoid(g)
            by_gate = grad_hidden * (slope + silu * (1 - slope))
            by_up = grad_hidden * silu
            up = load_half(1)
            # Without the gate weight: the gradient of that weight does not contain it. One sum per
            # program and row, in a place of its own: no atomics.
            total = target.tiled(jnp.sum(by_up * up, axis=1))
            target.store(tile_sums_ref.at[pl.ds((tile * across + column) * height, height)], total)
            prob = target.broadcast(target.load(probs.at[pl.ds(start, height)], 0), gate.shape)
            grad_gate = (by_gate * up * prob).astype(gate_up.dtype)
            grad_up = (by_up * prob).astype(gate_up.dtype)

            def store(values_tile, column, out):
                store_rows(values_tile, first[tile], size[tile], start, column, out)

            store(grad_gate, column, grad_gate_up_ref)
            store(grad_up, across + column, grad_gate_up_ref)

    grad_gate_up, tile_sums = launch(
        body,
        below * across,
        [
            jax.ShapeDtypeStruct((num_padded, 2 * width), gate_up.dtype),
            jax.ShapeDtypeStruct((below * across * height,), jnp.float32),
        ],
        [*tiles, *row_sources, down_weights, gate_up, probs],
        operation="hidden_gradients",
        name="swiglu_backward",
        simulated=simulated,
    )
    return grad_gate_up[:num_slots], _sum_row_tiles(
        tile_sums.reshape(below, across, height), tiles, num_slots
    )


def _pad_probs(probs: Array, sizes: Array, num_rows: int, height: int) -> Array:
    """Gate weights padded to whole tiles, 0 for rows of no group, so that their contents have no
    effect."""
    in_group = jnp.arange(probs.shape[0]) < jnp.sum(sizes)
    probs = jnp.where(in_group, probs.astype(jnp.float32), 0.0)
    return jnp.pad(probs, (0, -(-num_rows // height) * height - probs.shape[0]))


def _sum_row_tiles(tile_sums: Array, tiles: Tiles, num_rows: int) -> Array:
    """Sum of each row, from the partial sums that the programs of its tile wrote, added in order.

    A tile has sums for all rows of its block; those of other groups are dropped.
    """
    within = jnp.arange(tile_sums.shape[2])[None]
    first, stop = tiles.first[:, None], (tiles.first + tiles.size)[:, None]
    row = tiles.block[:, None] * tile_sums.shape[2] + within
    row = jnp.where((within >= first) & (within < stop), row, num_rows)
    # No row belongs to two tiles, so that this scatter needs no atomics.
    return jnp.zeros(num_rows).at[row].set(jnp.sum(tile_sums, axis=1), mode="drop")
