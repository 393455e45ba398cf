"""Products of rows with the matrix of their group, at the cost of the rows there are.

Rows arrive sorted by group. `jax.lax.ragged_dot` means the same, but where XLA has no kernel for
it every row meets every matrix. Each implementation is a forward product, the same with the
matrices transposed, and the product that sums over the rows of a group; `grouped_dot` makes one
differentiable function of them.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sharding.collectives import vary, varying

TILES = (256, 32)
"""Rows of the tiles that cover a group in the loop of "tiles", larger ones first. Large tiles make
better products, small ones waste less on the end of a group and on short groups."""


def grouped_dot(
    rows: Float[Array, "row inner"],
    weights: Float[Array, "group inner outer"],
    sizes: Int[Array, "group"],
    *,
    implementation: str | None = None,
) -> Float[Array, "row outer"]:
    """``out[r] = rows[r] @ weights[g]``, ``g`` the group of row ``r``.

    The first ``sizes[0]`` rows belong to group 0, the next ``sizes[1]`` to group 1, and so on. Rows
    past the sum of `sizes` belong to none: their result is 0, and whatever they hold reaches
    neither a result nor a gradient. Matrices are cast to the dtype of the rows where they are used.
    Products are summed in float32, those of the matrices' gradient over all rows of a group.

    Args:
      rows: sorted by group.
      weights: one matrix per group.
      sizes: rows of each group; none negative, together at most the number of rows.
      implementation: "tiles" loops over the rows there are, in tiles that each meet one matrix;
        "blocks" pads groups to whole blocks and copies a matrix for each, one batched product that
        suits accelerators; "ragged_dot" is XLA's; "every" is the plain twin, each row times each
        matrix. None is "tiles" on a CPU and "blocks" elsewhere.

    Raises:
      ValueError: `implementation` is none of these.

    References:
      Gale et al., "MegaBlocks", 2022 (rows in blocks of one expert). https://arxiv.org/abs/2211.15841
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is no grouped product: use one of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}, or None for the best that applies."
        )
    # The loops carry sums of products, which differ over every axis that an operand differs over.
    axes = tuple(varying(rows) | varying(weights) | varying(sizes))
    return _grouped_dot(*vary((rows, weights, sizes), axes), implementation)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_dot(rows, weights, sizes, implementation):
    return _named(implementation).each(0, rows, weights.astype(rows.dtype), sizes)


def _forward(rows, weights, sizes, implementation):
    return _grouped_dot(rows, weights, sizes, implementation), (rows, weights, sizes)


def _backward(implementation, residuals, out_gradient):
    rows, weights, sizes = residuals
    product, matrices = _named(implementation), weights.astype(rows.dtype)
    return (
        product.each(1, out_gradient, matrices, sizes),
        product.summed(rows, out_gradient, sizes).astype(weights.dtype),
        None,
    )


_grouped_dot.defvjp(_forward, _backward)


class Implementation(NamedTuple):
    """The two products that a grouped product and its gradient are made of.

    Attributes:
      each: ``(side, rows, weights, sizes)``, each row times the matrix of its group, of which it
        meets dimension `side`: 0 is the product, 1 the one with the matrices transposed.
      summed: ``(rows [row inner], others [row outer], sizes) -> [group inner outer]``, the sum of
        ``rows[r]^T others[r]`` over the rows of a group, float32.
    """

    each: Callable[..., Any]
    summed: Callable[..., Any]


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """`a` times `b` over one dimension of each, summed and returned in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _group_of_rows(sizes: Array, num_rows: int) -> Array:
    """The group of each row, one past the last for a row of none."""
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(num_rows, dtype=sizes.dtype), "right")


# "every": the plain twin.


def _every_each(side, rows, weights, sizes):
    mine = jax.nn.one_hot(_group_of_rows(sizes, rows.shape[0]), weights.shape[0], dtype=bool)
    # Cut off before multiplying: zero times what a row of no group may hold need not be zero.
    rows = jnp.where(mine.any(axis=1)[:, None], rows, 0)
    formula = ("ri,gio->rgo", "ro,gio->rgi")[side]
    products = jnp.einsum(formula, rows, weights, preferred_element_type=jnp.float32)
    return jnp.sum(products, axis=1, where=mine[:, :, None]).astype(rows.dtype)


def _every_summed(rows, others, sizes):
    mine = jax.nn.one_hot(_group_of_rows(sizes, rows.shape[0]), sizes.shape[0], dtype=bool)
    rows, others = (jnp.where(mine.T[:, :, None], x[None], 0) for x in (rows, others))
    return jnp.einsum("gri,gro->gio", rows, others, preferred_element_type=jnp.float32)


# "ragged_dot": XLA's, in its two forms.


def _ragged_each(side, rows, weights, sizes):
    dimensions = lax.RaggedDotDimensionNumbers((((1,), (1 + side,)), ((), ())), [0], [0])
    out = lax.ragged_dot_general(
        rows, weights, sizes, dimensions, preferred_element_type=jnp.float32
    )
    return out.astype(rows.dtype)


_CONTRACT_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def _ragged_summed(rows, others, sizes):
    known = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
    rows, others = jnp.where(known, rows, 0), jnp.where(known, others, 0)
    return lax.ragged_dot_general(
        rows, others, sizes, _CONTRACT_ROWS, preferred_element_type=jnp.float32
    )


# "tiles": a loop over groups and, within, over tiles of rows.


def _cover(
    tile: Callable[[Array, Array, int, Any], Any], start: Array, stop: Array, num_rows: int, out
):
    """`out` after ``tile(first, own, size, out)`` for tiles that cover rows `start` to `stop`.

    Each tile holds the rows from `first` on, of which `own` are its to treat: near the end of all
    rows it is moved up so as to stay within them, and at its own end it may run into the next
    group's rows.
    """
    heights = sorted({min(height, num_rows) for height in TILES}, reverse=True)
    # A tile is used while the next smaller one would need to be used as often as fills it.
    for height, smaller in pairwise([*heights, heights[-1]]):
        least = height - smaller if smaller < height else 0

        def step(carry, height=height):
            at, out = carry
            first = jnp.minimum(at, num_rows - height)
            row = first + jnp.arange(height, dtype=first.dtype)
            return at + height, tile(first, (row >= at) & (row < stop), height, out)

        def more(carry, least=least):
            return stop - carry[0] > least

        start, out = lax.while_loop(more, step, (start, out))
    return out


def _zeros(shape: tuple[int, ...], dtype, like: Array) -> Array:
    """Zeros typed as varying over the axes that `like` varies over."""
    return vary(jnp.zeros(shape, dtype), tuple(varying(like)))


def _tiles_each(side, rows, weights, sizes):
    stop = jnp.cumsum(sizes)

    def of_group(group, out):
        matrix = lax.dynamic_index_in_dim(weights, group, keepdims=False)

        def tile(first, own, height, out):
            product = _dot(lax.dynamic_slice_in_dim(rows, first, height), matrix, (1, side))
            before = lax.dynamic_slice_in_dim(out, first, height)
            after = jnp.where(own[:, None], product.astype(out.dtype), before)
            return lax.dynamic_update_slice_in_dim(out, after, first, axis=0)

        return _cover(tile, stop[group] - sizes[group], stop[group], rows.shape[0], out)

    out = _zeros((rows.shape[0], weights.shape[2 - side]), rows.dtype, rows)
    return lax.fori_loop(0, weights.shape[0], of_group, out)


def _tiles_summed(rows, others, sizes):
    stop = jnp.cumsum(sizes)

    def of_group(group):
        def tile(first, own, height, out):
            # Both sides are cut: a zero times what a foreign row may hold need not be zero.
            x, y = (
                jnp.where(own[:, None], lax.dynamic_slice_in_dim(side, first, height), 0)
                for side in (rows, others)
            )
            return out + _dot(x, y, (0, 0))

        out = _zeros((rows.shape[1], others.shape[1]), jnp.float32, rows)
        return _cover(tile, stop[group] - sizes[group], stop[group], rows.shape[0], out)

    return lax.map(of_group, jnp.arange(sizes.shape[0]))


# "blocks": groups padded to whole blocks, one batched product over blocks.


def block_size(num_rows: int, num_groups: int) -> int:
    """Rows per block: a power of two in 8..256 near a quarter of the rows of an average group.

    Smaller blocks waste less padding, larger ones make better products.
    """
    target = max(num_rows // (4 * num_groups), 1)
    return min(max(1 << (target.bit_length() - 1), 8), 256)


class Blocks(NamedTuple):
    """Where rows stand when each group starts at a block.

    Attributes:
      row: ``[block, place]`` the row in each place; one past the last where there is none.
      place: ``[row]`` the place of each row over all blocks; one past the last for a row of none.
      group: ``[block]`` the group of each block.
    """

    row: Array
    place: Array
    group: Array


def blocks_of(sizes: Int[Array, "group"], num_rows: int) -> Blocks:
    """The blocks of rows sorted by group."""
    num_groups = sizes.shape[0]
    size = block_size(num_rows, num_groups)
    num_blocks = -(-num_rows // size) + num_groups
    start, blocks = jnp.cumsum(sizes) - sizes, -(-sizes // size)
    first = jnp.cumsum(blocks) - blocks
    # Blocks past the last row belong to the last group and hold none of its rows.
    group = jnp.searchsorted(first, jnp.arange(num_blocks, dtype=first.dtype), "right") - 1
    within = (jnp.arange(num_blocks) - first[group])[:, None] * size + jnp.arange(size)[None]
    row = jnp.where(within < sizes[group, None], start[group, None] + within, num_rows)
    of_row = jnp.minimum(_group_of_rows(sizes, num_rows), num_groups - 1)
    index = jnp.arange(num_rows)
    place = jnp.where(
        index < jnp.sum(sizes), first[of_row] * size + index - start[of_row], num_blocks * size
    )
    return Blocks(row, place, group)


def _in_blocks(x: Array, blocks: Blocks) -> Array:
    return x.at[blocks.row].get(mode="fill", fill_value=0)


def _blocks_each(side, rows, weights, sizes):
    blocks = blocks_of(sizes, rows.shape[0])
    formula = ("bri,bio->bro", "bro,bio->bri")[side]
    out = jnp.einsum(
        formula,
        _in_blocks(rows, blocks),
        weights[blocks.group],
        preferred_element_type=jnp.float32,
    ).astype(rows.dtype)
    return out.reshape(-1, out.shape[-1]).at[blocks.place].get(mode="fill", fill_value=0)


def _blocks_summed(rows, others, sizes):
    blocks = blocks_of(sizes, rows.shape[0])
    x, y = _in_blocks(rows, blocks), _in_blocks(others, blocks)
    products = jnp.einsum("bri,bro->bio", x, y, preferred_element_type=jnp.float32)
    return jax.ops.segment_sum(products, blocks.group, sizes.shape[0], indices_are_sorted=True)


IMPLEMENTATIONS = {
    "tiles": Implementation(_tiles_each, _tiles_summed),
    "blocks": Implementation(_blocks_each, _blocks_summed),
    "ragged_dot": Implementation(_ragged_each, _ragged_summed),
    "every": Implementation(_every_each, _every_summed),
}


def _best_each(side, *operands):
    """A loop whose length is known at run time makes a GPU wait for its host at every turn."""
    by_platform = {
        "cpu": partial(_tiles_each, side),
        "default": partial(_blocks_each, side),
    }
    return lax.platform_dependent(*operands, **by_platform)


def _best_summed(*operands):
    return lax.platform_dependent(*operands, cpu=_tiles_summed, default=_blocks_summed)


def _named(name: str | None) -> Implementation:
    """The implementation of that name; for None, the best of each platform."""
    return Implementation(_best_each, _best_summed) if name is None else IMPLEMENTATIONS[name]
