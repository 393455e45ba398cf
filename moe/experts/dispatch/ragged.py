"""The ragged dispatcher: tokens go to the devices of their experts in slices as long as they are.

It is built on `jax.lax.ragged_all_to_all`, whose words it uses; CPU devices do not have it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.experts.dispatch.all_to_all import whole_experts
from moe.experts.dispatch.buffers import buffer_rows, peer_tokens
from moe.experts.dispatch.own import has_experts_at, slots_of
from moe.experts.permutation import inverse_slots, spread_rows, sum_rows, take_rows
from moe.remat import DISPATCHED
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import COLLECTIVE, gather_tokens, vary, varying
from sharding.folding import FoldedMesh


class PeerSlices(NamedTuple):
    """One side of a ragged all-to-all, an entry per peer along ``ep``.

    Attributes:
      input_offsets: first row of the slice for each peer in the own buffer.
      sizes: its rows.
      output_offsets: where it goes in the peer's buffer.
    """

    input_offsets: Array
    sizes: Array
    output_offsets: Array


def ragged_dispatch(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    capacity: int | None = None,
    product: str | None = None,
    buffer_factor: float | None = None,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """As `moe.experts.dispatch.all_to_all.all_to_all_dispatch`, with nothing but tokens that are
    there on the wire.

    The routing goes first, from which each device knows what it will be sent.

    Communication per device and layer, forward: an all-gather of the routing over ``ep``, ``2 T k
    (ep - 1)`` numbers; each token once to each other device with experts of its choice and back,
    with even routing at most ``2 T k (ep - 1) / ep`` of them. Over ``etp`` whole buffers travel,
    ``2 B (etp - 1)`` tokens with ``B = ep`` times `peer_tokens`.
    """
    num_local, num_peers = weights.down.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    sizes = num_tokens, k, num_local, mesh, capacity, buffer_factor
    # One buffer for all senders: what one leaves free another may use.
    num_slots = num_peers * peer_tokens(*sizes)

    experts, probs = (gather_tokens(array, mesh.ep) for array in routing)
    goes = has_experts_at(experts, num_local, num_peers)
    # Tokens from each device (first axis) to each device (second axis).
    counts = jnp.sum(goes.reshape(num_peers, num_tokens, num_peers), axis=1, dtype=jnp.int32)
    outward, homeward = peer_slices(counts, num_slots, mesh)

    # One peer after the other, each one's tokens in their own order.
    goes_from_here = has_experts_at(routing.experts, num_local, num_peers)
    position = outward.input_offsets[None] + jnp.cumsum(goes_from_here, axis=0) - 1
    most = num_tokens * min(k, num_peers)
    token, places = slots_of(jnp.where(goes_from_here, position, most), most, k)
    rows = send(spread_rows(x, token, places), outward, homeward, num_slots, DISPATCHED, mesh)

    # The slots of the tokens that come here, in the order in which their senders have them.
    comes = goes[:, lax.axis_index(mesh.ep)]
    slot = jnp.where(comes, jnp.cumsum(comes) - 1, num_slots)
    comer = inverse_slots(slot, num_slots)
    nobodys = num_peers * num_local
    ids = jnp.where(comer[:, None] < experts.shape[0], take_rows(experts, comer), nobodys)
    probs = spread_rows(probs, comer, slot[:, None])
    done, overflow = whole_experts(weights, rows, ids, probs, mesh, buffer_rows(*sizes), product)

    returned = send(done, homeward, outward, most, COLLECTIVE, mesh)
    out = sum_rows(returned, places, token).astype(x.dtype)
    return out, overflow + jnp.maximum(jnp.sum(comes) - num_slots, 0)


def peer_slices(
    counts: Int[Array, "peer peer"], num_slots: int, mesh: FoldedMesh
) -> tuple[PeerSlices, PeerSlices]:
    """What is sent to each peer, and what is sent back.

    Args:
      counts: rows from each device (first axis) to each (second axis), which stand one receiver
        after the other in the sender's buffer.
      num_slots: rows that a receiver has room for; the senders come one after the other.
    """
    at_sender = jnp.cumsum(counts, axis=1) - counts
    at_receiver = jnp.minimum(jnp.cumsum(counts, axis=0) - counts, num_slots)
    # What there is no room for stays where it is: the slices in the sender's buffer do not move.
    counts = jnp.minimum(counts, num_slots - at_receiver)
    own = lax.axis_index(mesh.ep)
    return (
        PeerSlices(at_sender[own], counts[own], at_receiver[own]),
        PeerSlices(at_receiver[:, own], counts[:, own], at_sender[:, own]),
    )


def send(
    rows: Float[Array, "row width"],
    sent: PeerSlices,
    received: PeerSlices,
    num_slots: int,
    name: str,
    mesh: FoldedMesh,
) -> Float[Array, "slot width"]:
    """The rows that peers sent here, in a buffer of `num_slots` rows filled up with zeros.

    Args:
      name: of the result, for `moe.remat`.
    """
    rows = vary(rows, mesh.ep)
    output = jnp.zeros((num_slots, rows.shape[1]), rows.dtype)
    output = vary(output, tuple(varying(rows)))
    sizes = (sent.input_offsets, sent.sizes, sent.output_offsets, received.sizes)
    received_rows = lax.ragged_all_to_all(rows, output, *sizes, axis_name=mesh.ep)
    return checkpoint_name(received_rows, name)
