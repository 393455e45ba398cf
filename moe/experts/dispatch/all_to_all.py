"""The all-to-all dispatcher: rows go to the devices of their experts, as many to each peer.

DeepEP and Megatron's ``MoEAlltoAllTokenDispatcher`` split a send buffer by counts known at run
time; XLA's all-to-all has equal splits, so each peer has `peer_capacity` slots of the buffer, some
empty.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.experts.feed_forward import routed_experts
from moe.experts.permutation import inverse_slots, positions_within, spread_rows, take_rows
from moe.precision import weighted_sum
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_to_all, gather_tokens, scatter_tokens
from sharding.folding import FoldedMesh


def peer_capacity(num_tokens: int, k: int, num_local: int, capacity: int | None) -> int:
    """Rows of the send buffer for one peer: ``min(T min(k, L), C L)``.

    A token has an expert once (`without_repeats` sees to it), so that it has at most ``min(k, L)``
    choices among L experts.
    """
    most = num_tokens * min(k, num_local)
    return most if capacity is None else min(most, capacity * num_local)


def all_to_all_dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    capacity: int | None = None,
    product: str | None = None,
) -> Float[Array, "local d_model"]:
    """Permute, all-to-all over ``ep``, all-gather over ``etp``, experts, and the way back.

    Communication per device and layer, forward, with R from `peer_capacity`: an all-to-all of ``R
    ep`` rows out and one back, an all-gather of them over ``etp`` and a reduce-scatter back; the
    rows' expert ids go out with them, one int32 each.

    References:
      Liu et al., "MoE Parallel Folding", 2025, figure 2. https://arxiv.org/abs/2504.14960
    """
    num_local, num_peers = weights.gate.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    per_peer = peer_capacity(num_tokens, k, num_local, capacity)
    num_slots = num_peers * per_peer

    experts = routing.experts.reshape(-1)
    peer = experts // num_local
    position, _ = positions_within(peer, num_peers)
    # Padding has an expert id past the last and so a peer past the last: it has no slot, and what
    # is more than the capacity promised must not take that of another peer.
    fits = (peer < num_peers) & (position < per_peer)
    slot = jnp.where(fits, peer * per_peer + position, num_slots)
    assignment = inverse_slots(slot, num_slots)

    token = jnp.where(assignment < num_tokens * k, assignment // k, num_tokens)
    send_buffer = spread_rows(x, token, x.dtype)
    # In an empty slot the id is one past the last local expert: the row is nobody's.
    ids = jnp.where(
        assignment < num_tokens * k, take_rows(experts % num_local, assignment), num_local
    )
    rows = all_to_all(send_buffer.reshape(num_peers, per_peer, -1), mesh.ep)
    ids = all_to_all(ids.reshape(num_peers, per_peer), mesh.ep)

    done = whole_experts(weights, rows.reshape(num_slots, -1), ids.reshape(-1), mesh, product)

    # The all-to-all is its own reverse: a row comes back to the slot it was sent from.
    returned = all_to_all(done.reshape(num_peers, per_peer, -1), mesh.ep)
    out = take_rows(returned.reshape(num_slots, -1), slot).reshape(num_tokens, k, -1)
    return weighted_sum(routing.probs, out).astype(out.dtype)


def whole_experts(
    weights: Experts[Array],
    rows: Float[Array, "row d_model"],
    ids: Int[Array, "row"],
    mesh: FoldedMesh,
    product: str | None = None,
) -> Float[Array, "row d_model"]:
    """`routed_experts` whose hidden units are spread over ``etp``.

    Each device computes its hidden units' part for the rows of all ``etp`` ranks; the parts add up.
    """
    rows, ids = (gather_tokens(array, mesh.etp) for array in (rows, ids))
    done = routed_experts(weights, rows, ids, product)
    return scatter_tokens(done, mesh.etp)
