"""The all-gather dispatcher: all tokens go to every device that shares experts; each computes its
own experts' part.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from moe.experts.dispatch.all_to_all import peer_capacity
from moe.experts.feed_forward import routed_experts
from moe.experts.permutation import inverse_slots, spread_rows, take_rows
from moe.precision import weighted_sum
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import gather_and_widen, gather_tokens, scatter_and_round
from sharding.folding import FoldedMesh


def all_gather_dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    capacity: int | None = None,
    product: str | None = None,
) -> Float[Array, "local d_model"]:
    """Gather tokens and routing over ``ep x etp``, sum what the own experts give, reduce-scatter.

    Communication per device and layer, forward, with ``n = ep etp`` and T local tokens: ``T d_model
    (n - 1)`` elements out and as many back in float32, whatever k is, and ``2 T k (n - 1)`` numbers
    of routing out; backward the same. It wins where k is large.

    References:
      Jin et al., "MegaScale-MoE", 2025, section 3.2. https://arxiv.org/abs/2505.11432
    """
    group, num_local = (*mesh.ep, *mesh.etp), weights.gate.shape[0]
    num_tokens, k = routing.experts.shape
    buffer_rows = mesh.size(group) * peer_capacity(num_tokens, k, num_local, capacity)
    # In float32 from here: a token's gradient is a sum over devices, rounded once at its own.
    dtype, x = x.dtype, gather_and_widen(x, group)
    experts, probs = (gather_tokens(array, group) for array in routing)

    local = experts - lax.axis_index(mesh.ep) * num_local
    own = (local >= 0) & (local < num_local)
    # A token has few experts here: its own choices come first and the columns of others go.
    columns = _first(own, min(experts.shape[1], num_local))
    own, local, probs = (jnp.take_along_axis(a, columns, axis=1) for a in (own, local, probs))

    # What is computed is bounded by what the all-to-all could send here: both have the same buffer.
    num_tokens, k = own.shape
    slot = jnp.where(own.reshape(-1), jnp.cumsum(own.reshape(-1)) - 1, buffer_rows)
    choice = inverse_slots(slot, buffer_rows)
    token = jnp.where(choice < num_tokens * k, choice // k, num_tokens)
    rows = spread_rows(x, token, dtype)
    ids = jnp.where(choice < num_tokens * k, take_rows(local.reshape(-1), choice), num_local)

    out = take_rows(routed_experts(weights, rows, ids, product), slot).reshape(num_tokens, k, -1)
    return scatter_and_round(weighted_sum(probs, out), group, dtype)


def _first(own: Bool[Array, "token k"], columns: int) -> Array:
    """For each token the `columns` columns of which all that are true come first, in order."""
    return jnp.argsort(~own, axis=1, stable=True)[:, :columns]
