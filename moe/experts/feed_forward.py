"""Feed-forward layers: the dense one, and many experts each on its own rows.

Rows are sorted by expert, multiplied by `grouped_dot` and put back. `dense_reference` is the plain
twin.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.experts.grouped.dot import grouped_dot
from moe.experts.permutation import inverse_slots, permute, sort_by_group
from moe.remat import PRODUCT
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


def routed_experts(
    weights: Experts[Array],
    rows: Float[Array, "row d_model"],
    experts: Int[Array, "row"],
    implementation: str | None = None,
) -> Float[Array, "row d_model"]:
    """SwiGLU of each row by its expert; rows of no expert give 0.

    Args:
      weights: the experts.
      rows: in any order.
      experts: the expert of each row; one past the last, or more, for none.
      implementation: of the products, see `moe.experts.grouped.dot.grouped_dot`.
    """
    order, sizes = sort_by_group(experts, weights.gate.shape[0])
    inverse = inverse_slots(order, order.shape[0])

    def product(rows, matrices):
        out = grouped_dot(rows, matrices, sizes=sizes, implementation=implementation)
        return checkpoint_name(out, PRODUCT)

    # One product for both: wider products are faster than two narrow ones.
    inward = jnp.concatenate([weights.gate, weights.up], axis=-1)
    gate, up = jnp.split(product(permute(rows, order, inverse), inward), 2, axis=-1)
    return permute(product(jax.nn.silu(gate) * up, weights.down), inverse, order)


def dense_reference(
    weights: Experts[Array],
    rows: Float[Array, "row d_model"],
    experts: Int[Array, "row"],
) -> Float[Array, "row d_model"]:
    """The plain twin of `routed_experts`: every row through every expert, one of them chosen."""
    gate = jax.nn.silu(jnp.einsum("nd,edf->nef", rows, weights.gate.astype(rows.dtype)))
    hidden = gate * jnp.einsum("nd,edf->nef", rows, weights.up.astype(rows.dtype))
    out = jnp.einsum("nef,efd->ned", hidden, weights.down.astype(rows.dtype))
    chosen = jax.nn.one_hot(experts, weights.gate.shape[0], dtype=rows.dtype)
    return jnp.einsum("ne,ned->nd", chosen, out)
