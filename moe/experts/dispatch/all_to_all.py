"""Rows go to the devices of their experts in equal parcels: an all-to-all over ``ep``."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.experts.feed_forward import routed_experts
from moe.experts.permutation import inverse_places, positions_within, spread_rows, take_rows
from moe.precision import weighted_sum
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import exchange, gather_tokens, scatter_tokens
from sharding.folding import FoldedMesh


def room(num_tokens: int, k: int, num_local: int, capacity: int | None) -> int:
    """Choices that one device can send to another: ``min(T min(k, L), C L)``.

    A token has an expert once (`without_repeats` sees to it), so that it has at most ``min(k, L)``
    choices among L experts.
    """
    most = num_tokens * min(k, num_local)
    return most if capacity is None else min(most, capacity * num_local)


def all_to_all(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    capacity: int | None = None,
    product: str | None = None,
) -> Float[Array, "local d_model"]:
    """Permute, all-to-all over ``ep``, all-gather over ``etp``, experts, and the way back.

    Communication per device and layer, forward, with room R: an all-to-all of ``R ep`` rows out and
    one back, an all-gather of them over ``etp`` and a reduce-scatter back; the rows' expert ids go
    out with them, one int32 each.

    References:
      Liu et al., "MoE Parallel Folding", 2025, figure 2. https://arxiv.org/abs/2504.14960
    """
    num_local, num_peers = weights.gate.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    parcel = room(num_tokens, k, num_local, capacity)

    experts = routing.experts.reshape(-1)
    peer = experts // num_local
    position, _ = positions_within(peer, num_peers)
    # Padding has an expert id past the last and so a peer past the last: it has no place, and what
    # is more than the capacity promised must not take that of another peer.
    fits = (peer < num_peers) & (position < parcel)
    place = jnp.where(fits, peer * parcel + position, num_peers * parcel)
    assignment = inverse_places(place, num_peers * parcel)

    token = jnp.where(assignment < num_tokens * k, assignment // k, num_tokens)
    rows = spread_rows(x, token, x.dtype)
    # Where no assignment is, the id is one past the last local expert: the row is nobody's.
    ids = jnp.where(
        assignment < num_tokens * k, take_rows(experts % num_local, assignment), num_local
    )
    rows = exchange(rows.reshape(num_peers, parcel, -1), mesh.ep)
    ids = exchange(ids.reshape(num_peers, parcel), mesh.ep)

    done = whole_experts(
        weights, rows.reshape(num_peers * parcel, -1), ids.reshape(-1), mesh, product
    )

    back = exchange(done.reshape(num_peers, parcel, -1), mesh.ep)
    out = take_rows(back.reshape(num_peers * parcel, -1), place).reshape(num_tokens, k, -1)
    return weighted_sum(routing.weights, out).astype(out.dtype)


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
