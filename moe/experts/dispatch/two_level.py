"""Two-level all-to-all token dispatcher: one copy of a token is sent to each server that has some
of its experts, and there one to each such device.

DeepEP and HybridEP send so between servers, whose links are slower than those inside: with k
experts on the devices of a server, a token crosses once and not k times.
"""

from functools import partial

from jax import lax
from jaxtyping import Array, Float, Int

from moe.experts.dispatch.all_to_all import Exchange, Peers, one_level_dispatch, sharded_experts
from moe.experts.dispatch.buffers import DispatchOptions, buffer_rows, peer_tokens
from moe.experts.dispatch.cost import hardware_of
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.costs.hardware import UNKNOWN
from sharding.folding import FoldedMesh
from sharding.folding.groups import ServerGroups, server_groups


def two_level_dispatch(
    exchange: Exchange,
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    options: DispatchOptions,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """Dispatches as `moe.experts.dispatch.all_to_all.one_level_dispatch`, by two exchanges: over
    servers, between devices of equal rank in them, and over the devices of a server.

    Both carry the expert ids and gate weights of a token. On the way back the outputs of a server's
    devices are summed there, in float32, and one row for each token and server returns. Devices of
    one server, or one device of each, have one exchange.

    Communication per device and layer, forward, with S servers of D devices along ``ep``, T local
    tokens and R from `peer_tokens`: all-to-alls of ``S min(T, D R)`` tokens between servers, out
    and back, of which ``1 / S`` stay, and of ``ep R`` inside, out and back, of which ``1 / D``
    stay. With one all-to-all ``R D (S - 1)`` tokens cross. In slices of dynamic length: all-gathers
    of the routing over servers, ``2 T k (S - 1)`` numbers, and inside, ``2 S min(T, D R) k (D -
    1)``; a token once to each other server with some of its experts, and there once to each other
    such device, and back.

    Args:
      exchange: `moe.experts.dispatch.all_to_all.exchange_tokens`, or `exchange_slices` of
        `moe.experts.dispatch.ragged`.

    References:
      DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.2.
      https://arxiv.org/abs/2412.19437
    """
    mesh, num_local = options.mesh, weights.down.shape[0]
    split = expert_servers(mesh, options.execution.server_devices)
    if 1 in split:
        return one_level_dispatch(exchange, weights, x, routing, options)
    num_tokens, num_experts = routing.experts.shape[0], mesh.size(mesh.ep) * num_local
    sizes = options.sizes(weights, routing)
    experts = partial(sharded_experts, weights, num_rows=buffer_rows(*sizes), options=options)
    per_device = peer_tokens(*sizes)
    experts_of_server = split.devices * num_local
    # No more tokens go to a server than there are.
    per_server = min(num_tokens, split.devices * per_device)
    servers = Peers(split.servers, experts_of_server, per_server, num_experts, groups=split.across)
    devices = Peers(
        split.devices,
        num_local,
        # Space that one server leaves free another may use.
        split.servers * per_device,
        num_experts,
        lax.axis_index(mesh.ep) // split.devices * experts_of_server,
        split.inside,
    )

    def in_server(rows: Array, ids: Array, probs: Array) -> tuple[Array, Array]:
        return exchange(rows, Routing(ids, probs), devices, experts, options)

    return exchange(x, routing, servers, in_server, options)


def expert_servers(mesh: FoldedMesh, server_devices: int | None) -> ServerGroups:
    """Servers of the devices along ``ep``.

    Args:
      server_devices: devices of a server; None is the number that the fast links of such devices
        join (`sharding.costs.hardware`).

    Raises:
      ValueError: for devices of an unknown kind if no number is given, and if servers have unequal
        parts of the devices along ``ep``.
    """
    if server_devices is None:
        hardware = hardware_of(mesh)
        if hardware is UNKNOWN:
            raise ValueError(
                "the number of devices of a server is not known, for a kind that is not in "
                "sharding.costs.hardware: give server_devices."
            )
        server_devices = hardware.domain
    return server_groups(mesh, mesh.ep, server_devices)
