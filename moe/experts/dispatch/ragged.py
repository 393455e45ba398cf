"""Ragged all-to-all token dispatcher: tokens are sent to the devices of their experts in slices of
dynamic length, without padding.

It uses `jax.lax.ragged_all_to_all` and its terms; CPU devices do not support it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.architecture.activation import Activation
from moe.experts.dispatch.all_to_all import whole_experts
from moe.experts.dispatch.buffers import buffer_rows, peer_tokens
from moe.experts.dispatch.own import has_experts_at, slots_of
from moe.experts.dispatch.slices import send, way_out
from moe.experts.fused import moves_of
from moe.experts.permutation import inverse_slots, spread_rows, sum_rows, take_rows
from moe.remat import DISPATCHED
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import COLLECTIVE, gather_tokens
from sharding.folding import FoldedMesh


def ragged_dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    capacity: int | None = None,
    product: str | None = None,
    buffer_factor: float | None = None,
    wire: str | None = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """Dispatches as `moe.experts.dispatch.all_to_all.all_to_all_dispatch`, but sends no empty
    slots.

    The routing is gathered first; from it each device computes what it will receive.

    Communication per device and layer, forward: an all-gather of the routing over ``ep``, ``2 T k
    (ep - 1)`` numbers; each token once to each other device with some of its experts and back, with
    balanced routing at most ``2 T k (ep - 1) / ep`` of them. Over ``etp`` full buffers are sent,
    ``2 B (etp - 1)`` tokens with ``B = ep`` times `peer_tokens`.
    """
    num_local, num_peers = weights.down.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    sizes = num_tokens, k, num_local, mesh, capacity, buffer_factor
    # One buffer for all senders: space that one leaves free another may use.
    num_slots = num_peers * peer_tokens(*sizes)

    experts, probs = (gather_tokens(array, mesh.ep) for array in routing)
    goes = has_experts_at(experts, num_local, num_peers)
    # Tokens from each device (first axis) to each device (second axis).
    counts = jnp.sum(goes.reshape(num_peers, num_tokens, num_peers), axis=1, dtype=jnp.int32)
    way = way_out(counts, num_slots, mesh)

    # One peer after the other, each one's tokens in their own order.
    goes_from_here = has_experts_at(routing.experts, num_local, num_peers)
    position = way.sent.input_offsets[None] + jnp.cumsum(goes_from_here, axis=0) - 1
    most = num_tokens * min(k, num_peers)
    token, places = slots_of(jnp.where(goes_from_here, position, most), most, k)
    kernels = moves_of(product)
    rows = spread_rows(x, token, places, None, kernels)
    rows = send(rows, way, num_slots, DISPATCHED, mesh, wire)

    # The slots of the tokens that come here, in the order in which their senders have them.
    comes = goes[:, lax.axis_index(mesh.ep)]
    slot = jnp.where(comes, jnp.cumsum(comes) - 1, num_slots)
    comer = inverse_slots(slot, num_slots)
    nobodys = num_peers * num_local
    ids = jnp.where(comer[:, None] < experts.shape[0], take_rows(experts, comer), nobodys)
    probs = spread_rows(probs, comer, slot[:, None])
    done, overflow = whole_experts(
        weights, rows, ids, probs, mesh, buffer_rows(*sizes), product, wire, activation
    )

    returned = send(done, way.back, most, COLLECTIVE, mesh, wire)
    out = sum_rows(returned, places, token, kernels).astype(x.dtype)
    return out, overflow + jnp.maximum(jnp.sum(comes) - num_slots, 0)
