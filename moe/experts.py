"""Feed-forward layers: the dense one, and many experts each on its own rows.

Rows reach the experts grouped and padded to blocks (`GroupedRows`), so that a product with a
different matrix per expert is one batched product over blocks: it costs what the rows need plus at
most one block per expert. `every_expert` is the plain twin.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from moe.weights import Dense, Experts
from sharding.collectives import gather_tokens, scatter_tokens
from sharding.folding import FoldedMesh


def dense(
    weights: Dense[Array], x: Float[Array, "local d_model"], mesh: FoldedMesh
) -> Float[Array, "local d_model"]:
    """SwiGLU, ``(silu(x G) * x U) D``, hidden units spread over ``tp``.

    Communication per device: one `gather_tokens` and one `scatter_tokens` over ``tp``.

    References:
      Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
    """
    x = gather_tokens(x, mesh.tp)
    gate = jax.nn.silu(x @ weights.gate.astype(x.dtype))
    hidden = gate * (x @ weights.up.astype(x.dtype))
    return scatter_tokens(hidden @ weights.down.astype(x.dtype), mesh.tp)


class GroupedRows(NamedTuple):
    """Where rows go so that each expert's rows are contiguous and start at a block.

    Attributes:
      slot: ``[row]`` place of each row in the padded order; one past its end for a row of no
        expert.
      row: ``[slot]`` the row in each place; one past the last row where the place is padding.
      block_expert: ``[block]`` the expert whose rows a block holds.
    """

    slot: Array
    row: Array
    block_expert: Array

    @property
    def block_size(self) -> int:
        return self.row.shape[0] // self.block_expert.shape[0]


def block_size(num_rows: int, num_experts: int) -> int:
    """Rows per block: a power of two in 8..256 near a quarter of the rows of an average expert.

    Smaller blocks waste less padding, larger ones make better products.
    """
    target = max(num_rows // (4 * num_experts), 1)
    return min(max(1 << (target.bit_length() - 1), 8), 256)


def positions_within(groups: Int[Array, "row"], num_groups: int) -> tuple[Array, Array]:
    """The place of each row among the rows of its group, in order, and the size of each group.

    Rows whose group is out of range have no meaningful place and are counted nowhere.
    """
    member = jax.nn.one_hot(groups, num_groups, dtype=jnp.int32)
    running = jnp.cumsum(member, axis=0)
    return jnp.sum(member * running, axis=1) - 1, running[-1]


def inverse_places(places: Int[Array, "row"], num_places: int) -> Int[Array, "place"]:
    """Which row is in each place; one past the last row where there is none."""
    empty = jnp.full((num_places,), places.shape[0], jnp.int32)
    return empty.at[places].set(jnp.arange(places.shape[0], dtype=jnp.int32), mode="drop")


def take_rows(
    x: Shaped[Array, "row *rest"], rows: Int[Array, "place"]
) -> Shaped[Array, "place *rest"]:
    """`x[rows]`, with zeros where the index is past the end."""
    return x.at[rows].get(mode="fill", fill_value=0)


def group_rows(experts: Int[Array, "row"], num_experts: int) -> GroupedRows:
    """Groups rows by expert. An id of `num_experts` or more belongs to none."""
    size = block_size(experts.shape[0], num_experts)
    num_blocks = -(-experts.shape[0] // size) + num_experts
    position, count = positions_within(experts, num_experts)
    blocks = -(-count // size)
    first_block = jnp.cumsum(blocks) - blocks
    start = jnp.concatenate([first_block * size, jnp.array([num_blocks * size])])
    slot = jnp.where(
        experts < num_experts,
        start[jnp.minimum(experts, num_experts)] + position,
        num_blocks * size,
    )
    # Blocks past the last row belong to whichever expert comes last; their rows are zero.
    order = jnp.arange(num_blocks)
    block_expert = jnp.sum(order[:, None] >= first_block[None, :], axis=1) - 1
    return GroupedRows(slot, inverse_places(slot, num_blocks * size), block_expert)


def grouped_dot(
    rows: Float[Array, "slot inner"],
    weights: Float[Array, "expert inner outer"],
    groups: GroupedRows,
) -> Float[Array, "slot outer"]:
    """Each row times the matrix of its expert: one batched product over blocks."""
    blocks = rows.reshape(-1, groups.block_size, rows.shape[-1])
    matrices = weights[groups.block_expert].astype(rows.dtype)
    return jnp.einsum("nbi,nio->nbo", blocks, matrices).reshape(rows.shape[0], -1)


def routed_experts(
    weights: Experts[Array],
    rows: Float[Array, "row d_model"],
    experts: Int[Array, "row"],
) -> Float[Array, "row d_model"]:
    """SwiGLU of each row by its expert; rows of no expert give 0."""
    groups = group_rows(experts, weights.gate.shape[0])
    x = take_rows(rows, groups.row)
    # One product for both: wider products are faster than two narrow ones.
    inward = jnp.concatenate([weights.gate, weights.up], axis=-1)
    gate, up = jnp.split(grouped_dot(x, inward, groups), 2, axis=-1)
    hidden = jax.nn.silu(gate) * up
    return take_rows(grouped_dot(hidden, weights.down, groups), groups.slot)


def every_expert(
    weights: Experts[Array],
    rows: Float[Array, "row d_model"],
    experts: Int[Array, "row"],
) -> Float[Array, "row d_model"]:
    """The plain twin of `routed_experts`: every row through every expert, one of them kept."""
    gate = jax.nn.silu(jnp.einsum("nd,edf->nef", rows, weights.gate.astype(rows.dtype)))
    hidden = gate * jnp.einsum("nd,edf->nef", rows, weights.up.astype(rows.dtype))
    out = jnp.einsum("nef,efd->ned", hidden, weights.down.astype(rows.dtype))
    kept = jax.nn.one_hot(experts, weights.gate.shape[0], dtype=rows.dtype)
    return jnp.einsum("ne,ned->nd", kept, out)
