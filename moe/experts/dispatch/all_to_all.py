"""Token dispatchers of equal splits. All-to-all sends tokens to the devices of their experts, in
buffers of equal size for each peer; all-gather sends all tokens to every device.

DeepEP and Megatron's ``MoEAlltoAllTokenDispatcher`` split a send buffer by counts known at run
time; XLA's all-to-all has equal splits, so each peer has `peer_tokens` slots of the buffer, some
empty.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from moe.experts.permutation import permutation_kernel, permute_rows, unpermute_rows
from moe.ops.sorting import take_rows
from moe.remat import DISPATCHED
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import (
    COLLECTIVE,
    IndexGroups,
    all_to_all,
    gather_and_widen,
    gather_tokens,
    scatter_and_round,
    scatter_tokens,
)
from sharding.compression import exchange_fp8, gather_fp8, scatter_fp8

Compute = Callable[[Array, Array, Array], tuple[Array, Array]]
"""(rows, expert ids, gate weights) -> sums of the rows, in their dtype, and the overflow."""


class Peers(NamedTuple):
    """Peers of a token exchange over ``ep``, and the buffers for them.

    Attributes:
      number: of peers, this one included.
      num_local: experts of each.
      slots: largest number of tokens that are sent to one.
      num_experts: of all devices, and the id of no expert.
      first: first expert of the first peer.
      groups: groups of indices along ``ep`` that exchange among themselves; None is one of all.
    """

    number: int
    num_local: int
    slots: int
    num_experts: int
    first: int | Int[Array, ""] = 0
    groups: IndexGroups | None = None


Exchange = Callable[[Array, Routing, Peers, Compute, DispatchOptions], tuple[Array, Array]]
"""Function such as `exchange_tokens`."""


def one_level_dispatch(
    exchange: Exchange,
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    options: DispatchOptions,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """Permutes tokens, sends them by one exchange among all devices along ``ep`` and an all-gather
    over ``etp``, runs the experts, and reverses it.

    A token is sent once to each device that has some of its experts, with all its expert ids and
    gate weights, and one sum of their outputs comes back.

    Communication per device and layer, forward, with R from `peer_tokens`: as `exchange`, and over
    ``etp`` an all-gather of ``R ep`` tokens and a reduce-scatter back.

    References:
      Liu et al., "MoE Parallel Folding", 2025, figure 2. https://arxiv.org/abs/2504.14960
    """
    mesh, num_local = options.mesh, weights.down.shape[0]
    sizes = options.sizes(weights, routing)
    experts = partial(sharded_experts, weights, num_rows=buffer_rows(*sizes), options=options)
    ep = mesh.size(mesh.ep)
    peers = Peers(ep, num_local, peer_tokens(*sizes), ep * num_local)
    return exchange(x, routing, peers, experts, options)


def exchange_tokens(
    x: Float[Array, "local d_model"],
    routing: Routing,
    peers: Peers,
    compute: Compute,
    options: DispatchOptions,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """Sends each token once to each peer that has some of its experts, computes, and sums what
    comes back.

    Communication per device and layer, forward: all-to-alls of ``slots number`` tokens of `peers`,
    out and back; ``2 k`` numbers of routing go out with each token.

    Args:
      routing: expert ids over the experts of all devices; ids of peers that are not among `peers`
        are passed over.
      compute: of the tokens that this device receives.

    Returns:
      The sums, and the overflow here and in `compute`.
    """
    mesh, (num_tokens, k) = options.mesh, routing.experts.shape
    num_slots, kernels = peers.number * peers.slots, permutation_kernel(options.product)

    is_sent = has_experts_at(routing.experts - peers.first, peers.num_local, peers.number)
    position = jnp.cumsum(is_sent, axis=0) - 1
    # Overflow must not take the slots of another peer.
    fits = is_sent & (position < peers.slots)
    slot = jnp.where(fits, jnp.arange(peers.number)[None] * peers.slots + position, num_slots)
    token, slots = slots_of(slot, num_slots, k)

    def exchange(rows: Array, name: str = COLLECTIVE, collective: Any = all_to_all) -> Array:
        rows = rows.reshape(peers.number, peers.slots, -1)
        return collective(rows, mesh.ep, name, peers.groups).reshape(num_slots, -1)

    is_fp8 = options.execution.activation_wire is not None
    exchange_rows = partial(exchange, collective=exchange_fp8 if is_fp8 else all_to_all)

    # In an empty slot every id is past the last expert, so no expert computes it.
    ids = take_rows(routing.experts, token)
    ids = jnp.where(token[:, None] < num_tokens, ids, peers.num_experts)
    rows = exchange_rows(permute_rows(x, token, slots, None, kernels), DISPATCHED)
    experts, probs = exchange(ids), exchange(permute_rows(routing.probs, token, slots))

    outputs, overflow = compute(rows, experts, probs)

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
    dtype, mesh, comm_dtype = rows.dtype, options.mesh, options.execution.activation_wire
    gather = gather_tokens if comm_dtype is None else gather_fp8
    rows = gather(rows, mesh.etp, name=DISPATCHED)
    experts, probs = (gather_tokens(array, mesh.etp) for array in (experts, probs))
    outputs, overflow = _local_experts(weights, rows, experts, probs, num_rows, options)
    scatter = scatter_tokens if comm_dtype is None else scatter_fp8
    return scatter(outputs.astype(dtype), mesh.etp), overflow


def _local_experts(
    weights: Experts[Array],
    rows: Array,
    experts: Array,
    probs: Array,
    num_rows: int,
    options: DispatchOptions,
    dtype: Any = None,
) -> tuple[Array, Array]:
    """`routed_experts` of this device for expert ids of all devices."""
    return routed_experts(
        mask_replicated_bias(weights, options.mesh),
        rows,
        *local_assignments(experts, probs, weights.down.shape[0], options.mesh),
        num_rows=num_rows,
        dtype=dtype,
        implementation=options.product,
        activation=options.activation,
    )


def all_gather_dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    options: DispatchOptions,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """All-gathers tokens and routing over ``ep x etp``, sums the outputs of the local experts, and
    reduce-scatters the sums.

    Communication per device and layer, forward, with ``n = ep etp`` and T local tokens: ``T d_model
    (n - 1)`` elements out and as many back in float32, for any k, and ``2 T k (n - 1)`` numbers of
    routing out; backward the same. It is the fastest for large k.

    References:
      Jin et al., "MegaScale-MoE", 2025, section 3.2. https://arxiv.org/abs/2505.11432
    """
    mesh, comm_dtype = options.mesh, options.execution.activation_wire
    group = *mesh.ep, *mesh.etp
    # In float32 from here: a token's gradient is a sum over devices, rounded once at its own.
    dtype = x.dtype
    if comm_dtype is None:
        x = gather_and_widen(x, group, DISPATCHED)
    else:
        x = gather_fp8(x, group, jnp.float32, DISPATCHED)
    experts, probs = (gather_tokens(array, group) for array in routing)
    num_rows = buffer_rows(*options.sizes(weights, routing))
    sums, overflow = _local_experts(weights, x, experts, probs, num_rows, options, dtype)
    scatter = scatter_and_round if comm_dtype is None else scatter_fp8
    return scatter(sums, group, dtype), overflow
