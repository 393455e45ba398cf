"""All-to-all token dispatcher: tokens are sent to the devices of their experts, in buffers of equal
size for each peer.

DeepEP and Megatron's ``MoEAlltoAllTokenDispatcher`` split a send buffer by counts known at run
time; XLA's all-to-all has equal splits, so each peer has `peer_tokens` slots of the buffer, some
empty.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.experts.dispatch.buffers import (
    DispatchOptions,
    buffer_rows,
    has_experts_at,
    local_assignments,
    mask_replicated_bias,
    peer_tokens,
    slots_of,
)
from moe.experts.feed_forward import routed_experts
from moe.experts.fused import permutation_kernel
from moe.experts.permutation import permute_rows, unpermute_rows
from moe.ops.sorting import take_rows
from moe.remat import DISPATCHED
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import all_to_all, gather_tokens, scatter_tokens
from sharding.compression import exchange_fp8, gather_fp8, scatter_fp8


def all_to_all_dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    options: DispatchOptions,
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
    mesh, num_local = options.mesh, weights.down.shape[0]
    num_peers, (num_tokens, k) = mesh.size(mesh.ep), routing.experts.shape
    sizes = num_tokens, k, num_local, mesh, options.capacity, options.buffer_factor
    per_peer = peer_tokens(*sizes)
    num_slots, kernels = num_peers * per_peer, permutation_kernel(options.product)

    is_sent = has_experts_at(routing.experts, num_local, num_peers)
    position = jnp.cumsum(is_sent, axis=0) - 1
    # Overflow must not take the slots of another peer.
    fits = is_sent & (position < per_peer)
    slot = jnp.where(fits, jnp.arange(num_peers)[None] * per_peer + position, num_slots)
    token, slots = slots_of(slot, num_slots, k)

    def exchange(rows: Array, name: str | None = None) -> Array:
        names = () if name is None else (name,)
        rows = all_to_all(rows.reshape(num_peers, per_peer, -1), mesh.ep, *names)
        return rows.reshape(num_slots, -1)

    def exchange_rows(rows: Array, *name: str) -> Array:
        if options.comm_dtype is None:
            return exchange(rows, *name)
        rows = exchange_fp8(rows.reshape(num_peers, per_peer, -1), mesh.ep, *name)
        return rows.reshape(num_slots, -1)

    # In an empty slot every id is past the last expert, so no expert computes it.
    no_expert = num_peers * num_local
    ids = jnp.where(token[:, None] < num_tokens, take_rows(routing.experts, token), no_expert)
    rows = exchange_rows(permute_rows(x, token, slots, None, kernels), DISPATCHED)
    experts, probs = exchange(ids), exchange(permute_rows(routing.probs, token, slots))

    num_rows = buffer_rows(*sizes)
    outputs, overflow = sharded_experts(weights, rows, experts, probs, num_rows, options)

    # The all-to-all is its own reverse: a sum comes back to the slot its token was sent from.
    out = unpermute_rows(exchange_rows(outputs), slots, token, kernels).astype(x.dtype)
    return out, overflow + jnp.sum(is_sent & ~fits)


def sharded_experts(
    weights: Experts[Array],
    rows: Float[Array, "row d_model"],
    experts: Int[Array, "row k"],
    probs: Float[Array, "row k"],
    num_rows: int,
    options: DispatchOptions,
) -> tuple[Float[Array, "row d_model"], Int[Array, ""]]:
    """`routed_experts` with experts sharded over ``ep`` and their hidden units over ``etp``.

    Each device computes its hidden units for the tokens of all ``etp`` ranks; the partial sums are
    reduce-scattered.

    Args:
      experts: ids over the experts of all devices.
    """
    dtype, mesh, comm_dtype = rows.dtype, options.mesh, options.comm_dtype
    gather = gather_tokens if comm_dtype is None else gather_fp8
    rows = gather(rows, mesh.etp, name=DISPATCHED)
    experts, probs = (gather_tokens(array, mesh.etp) for array in (experts, probs))
    outputs, overflow = routed_experts(
        mask_replicated_bias(weights, mesh),
        rows,
        *local_assignments(experts, probs, weights.down.shape[0], mesh),
        num_rows=num_rows,
        implementation=options.product,
        activation=options.activation,
    )
    scatter = scatter_tokens if comm_dtype is None else scatter_fp8
    return scatter(outputs.astype(dtype), mesh.etp), overflow
