"""Ragged all-to-all token dispatcher: tokens are sent to the devices of their experts in slices of
dynamic length, without padding.

It uses `jax.lax.ragged_all_to_all` and its terms; CPU devices do not support it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moe.architecture.feed_forward import Activation
from moe.experts.dispatch.all_to_all import sharded_experts
from moe.experts.dispatch.assignment import has_experts_at, slots_of
from moe.experts.dispatch.buffers import buffer_rows, peer_tokens
from moe.experts.dispatch.slices import exchange_rows, plan_exchange
from moe.experts.fused import permutation_kernel
from moe.experts.permutation import permute_rows, unpermute_rows
from moe.ops.sorting import inverse_slots, take_rows
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
    comm_dtype: str | None = None,
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
    is_sent = has_experts_at(experts, num_local, num_peers)
    # Tokens from each device (first axis) to each device (second axis).
    counts = jnp.sum(is_sent.reshape(num_peers, num_tokens, num_peers), axis=1, dtype=jnp.int32)
    plan = plan_exchange(counts, num_slots, mesh)

    # One peer after the other, each one's tokens in their own order.
    is_sent_here = has_experts_at(routing.experts, num_local, num_peers)
    position = plan.sent.input_offsets[None] + jnp.cumsum(is_sent_here, axis=0) - 1
    most = num_tokens * min(k, num_peers)
    token, slots = slots_of(jnp.where(is_sent_here, position, most), most, k)
    kernels = permutation_kernel(product)
    rows = permute_rows(x, token, slots, None, kernels)
    rows = exchange_rows(rows, plan, num_slots, DISPATCHED, mesh, comm_dtype)

    # The slots of the tokens that come here, in the order in which their senders have them.
    is_received = is_sent[:, lax.axis_index(mesh.ep)]
    slot = jnp.where(is_received, jnp.cumsum(is_received) - 1, num_slots)
    received_token = inverse_slots(slot, num_slots)
    no_expert = num_peers * num_local
    ids = jnp.where(
        received_token[:, None] < experts.shape[0], take_rows(experts, received_token), no_expert
    )
    probs = permute_rows(probs, received_token, slot[:, None])
    outputs, overflow = sharded_experts(
        weights, rows, ids, probs, mesh, buffer_rows(*sizes), product, comm_dtype, activation
    )

    returned = exchange_rows(outputs, plan.reverse, most, COLLECTIVE, mesh, comm_dtype)
    out = unpermute_rows(returned, slots, token, kernels).astype(x.dtype)
    return out, overflow + jnp.maximum(jnp.sum(is_received) - num_slots, 0)
