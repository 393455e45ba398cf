"""Tokens travel to the devices that hold their experts, and back.

Dropless: each pair of devices has room for every assignment that could go between them, so the
  result
never depends on how even the routing is. One path serves any mesh, a single device included.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.experts import inverse_places, positions_within, routed_experts, take_rows
from moe.routing import Routing
from moe.weights import Experts
from sharding.collectives import exchange
from sharding.folding import FoldedMesh


def dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
) -> Float[Array, "local d_model"]:
    """``sum_k w_k expert_k(x)`` for this device's tokens, experts spread over ``ep``.

    Communication per device and layer, forward, with T local tokens, k experts per token and room
    for ``C = T min(k, experts per device)`` assignments from one device to another: ``C d_model
    (ep - 1)`` elements out and as many back, and ``C (ep - 1)`` integers out.

    Args:
      weights: the experts of this device.
      x: normalised tokens of this device.
      routing: where they go, over the experts of all devices.
    """
    num_local, num_peers = weights.gate.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    room = num_tokens * min(k, num_local)

    experts = routing.experts.reshape(-1)
    peer = experts // num_local
    position, _ = positions_within(peer, num_peers)
    # Padding has an expert id past the last and so a peer past the last: it has no place.
    place = jnp.where(peer < num_peers, peer * room + position, num_peers * room)
    assignment = inverse_places(place, num_peers * room)

    rows = take_rows(x, jnp.where(assignment < num_tokens * k, assignment // k, num_tokens))
    # Where no assignment is, the id is one past the last local expert: the row is nobody's.
    ids = jnp.where(
        assignment < num_tokens * k, take_rows(experts % num_local, assignment), num_local
    )
    rows = exchange(rows.reshape(num_peers, room, -1), mesh.ep)
    ids = exchange(ids.reshape(num_peers, room), mesh.ep)

    done = routed_experts(weights, rows.reshape(num_peers * room, -1), ids.reshape(-1))

    back = exchange(done.reshape(num_peers, room, -1), mesh.ep).reshape(num_peers * room, -1)
    out = take_rows(back, place).reshape(num_tokens, k, -1)
    return jnp.einsum("nk,nkd->nd", routing.weights.astype(out.dtype), out)
