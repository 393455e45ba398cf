"""All-to-all token dispatcher: tokens are sent to the devices of their experts, in buffers of equal
size for each peer.

DeepEP and Megatron's ``MoEAlltoAllTokenDispatcher`` split a send buffer by counts known at run
time; XLA's all-to-all has equal splits, so each peer has `peer_tokens` slots of the buffer, some
empty.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.architecture.activation import Activation
from moe.experts.dispatch.buffers import buffer_rows, peer_tokens
from moe.experts.dispatch.own import has_experts_at, own_choices, slots_of, with_one_bias
from moe.experts.feed_forward import routed_experts
from moe.experts.fused import moves_of
from moe.experts.permutation import spread_rows, sum_rows, take_rows
from moe.remat import DISPATCHED
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_to_all, gather_tokens, scatter_tokens
from sharding.compression import exchange_fp8, gather_fp8, scatter_fp8
from sharding.folding import FoldedMesh


def all_to_all_dispatch(
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
    """Permutes tokens, sends them by an all-to-all over ``ep`` and an all-gather over ``etp``, runs
    the experts, and reverses it.

    A token is sent once to each device that has some of its experts, with all its expert ids and
    gate weights, and one sum of their outputs comes back.

    Communication per device and layer, forward, with R from `peer_tokens`: an all-to-all of ``R
    ep`` tokens out and one back, an all-gather of them over ``etp`` and a reduce-scatter back; ``2
    k`` numbers of routing go out with each token.

    References:
      Liu et al., "MoE Parallel Folding", 2025, figure 2. https://arxiv.org/abs/2504.14960
    """
    num_local, num_peers = weights.down.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    sizes = num_tokens, k, num_local, mesh, capacity, buffer_factor
    per_peer = peer_tokens(*sizes)
    num_slots, kernels = num_peers * per_peer, moves_of(product)

    goes = has_experts_at(routing.experts, num_local, num_peers)
    position = jnp.cumsum(goes, axis=0) - 1
    # Overflow must not take the slots of another peer.
    fits = goes & (position < per_peer)
    slot = jnp.where(fits, jnp.arange(num_peers)[None] * per_peer + position, num_slots)
    token, places = slots_of(slot, num_slots, k)

    def exchange(rows: Array, name: str | None = None) -> Array:
        named = () if name is None else (name,)
        rows = all_to_all(rows.reshape(num_peers, per_peer, -1), mesh.ep, *named)
        return rows.reshape(num_slots, -1)

    def exchange_wide(rows: Array, *name: str) -> Array:
        if wire is None:
            return exchange(rows, *name)
        rows = exchange_fp8(rows.reshape(num_peers, per_peer, -1), mesh.ep, *name)
        return rows.reshape(num_slots, -1)

    # In an empty slot every id is past the last expert, so no expert computes it.
    nobodys = num_peers * num_local
    ids = jnp.where(token[:, None] < num_tokens, take_rows(routing.experts, token), nobodys)
    rows = exchange_wide(spread_rows(x, token, places, None, kernels), DISPATCHED)
    experts, probs = exchange(ids), exchange(spread_rows(routing.probs, token, places))

    done, overflow = whole_experts(
        weights, rows, experts, probs, mesh, buffer_rows(*sizes), product, wire, activation
    )

    # The all-to-all is its own reverse: a sum comes back to the slot its token was sent from.
    out = sum_rows(exchange_wide(done), places, token, kernels).astype(x.dtype)
    return out, overflow + jnp.sum(goes & ~fits)


def whole_experts(
    weights: Experts[Array],
    rows: Float[Array, "row d_model"],
    experts: Int[Array, "row k"],
    probs: Float[Array, "row k"],
    mesh: FoldedMesh,
    num_rows: int,
    product: str | None = None,
    wire: str | None = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "row d_model"], Int[Array, ""]]:
    """`routed_experts` with experts sharded over ``ep`` and their hidden units over ``etp``.

    Each device computes its hidden units for the tokens of all ``etp`` ranks; the partial sums are
    reduce-scattered.

    Args:
      experts: ids over the experts of all devices.
    """
    dtype, gather = rows.dtype, gather_tokens if wire is None else gather_fp8
    rows = gather(rows, mesh.etp, name=DISPATCHED)
    experts, probs = (gather_tokens(array, mesh.etp) for array in (experts, probs))
    own = own_choices(experts, probs, weights.down.shape[0], mesh)
    done, overflow = routed_experts(
        with_one_bias(weights, mesh),
        rows,
        *own,
        num_rows=num_rows,
        implementation=product,
        activation=activation,
    )
    scatter = scatter_tokens if wire is None else scatter_fp8
    return scatter(done.astype(dtype), mesh.etp), overflow
