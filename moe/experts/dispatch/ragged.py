"""The ragged dispatcher: rows go to the devices of their experts in slices as long as they are.

It is built on `jax.lax.ragged_all_to_all`, whose words it uses; CPU devices do not have it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from moe.experts.dispatch.all_to_all import peer_capacity, whole_experts
from moe.experts.permutation import inverse_slots, spread_rows, take_rows
from moe.precision import weighted_sum
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import gather_tokens, vary, varying
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
) -> Float[Array, "local d_model"]:
    """As `moe.experts.dispatch.all_to_all.all_to_all_dispatch`, with nothing but chosen rows on the
    wire.

    Communication per device and layer, forward: the rows chosen elsewhere out and back, with even
    routing ``2 T k (ep - 1) / ep``, their ids (one int32 a row) out, and an all-gather of ``ep``
    counts. Over ``etp`` whole buffers travel, ``2 R ep (etp - 1)`` rows with R from
    `peer_capacity`.
    """
    num_local, num_peers = weights.gate.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    experts = routing.experts.reshape(-1)
    # Grouped by expert and so by peer; what goes nowhere has the largest id and comes last.
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.sum((experts // num_local)[:, None] == jnp.arange(num_peers)[None, :], axis=0)
    per_peer = peer_capacity(num_tokens, k, num_local, capacity)
    outward, homeward = peer_slices(sizes, per_peer, mesh)

    num_slots = num_peers * per_peer
    rows = send(spread_rows(x, order // k, x.dtype), outward, homeward, num_slots, 0, mesh)
    # Ids in a transfer of their own: rows may be half precision, and ids must not be.
    ids = (experts % num_local)[order][:, None].astype(jnp.int32)
    ids = send(ids, outward, homeward, num_slots, num_local, mesh)[:, 0]

    done = whole_experts(weights, rows, ids, mesh, product)

    returned = send(done, homeward, outward, num_tokens * k, 0, mesh)
    out = take_rows(returned, inverse_slots(order, num_tokens * k)).reshape(num_tokens, k, -1)
    return weighted_sum(routing.probs, out).astype(out.dtype)


def peer_slices(
    sizes: Int[Array, "peer"], peer_capacity: int, mesh: FoldedMesh
) -> tuple[PeerSlices, PeerSlices]:
    """What is sent to each peer, and what is sent back.

    Args:
      sizes: rows for each peer, which stand one peer after the other in the send buffer.
      peer_capacity: rows of them that are sent at most, the first ones.
    """
    # Rows from each device (first axis) to each device (second axis).
    counts = gather_tokens(sizes.astype(jnp.int32)[None], mesh.ep)
    # In the sender's buffer slices stand by receiver, in the receiver's by sender.
    at_sender = jnp.cumsum(counts, axis=1) - counts
    # Receivers leave `peer_capacity` rows for each sender: what is beyond stays where it is.
    counts = jnp.minimum(counts, peer_capacity)
    at_receiver = jnp.cumsum(counts, axis=0) - counts
    own = lax.axis_index(mesh.ep)
    return (
        PeerSlices(at_sender[own], counts[own], at_receiver[own]),
        PeerSlices(at_receiver[:, own], counts[:, own], at_sender[:, own]),
    )


def send(
    rows: Shaped[Array, "row width"],
    sent: PeerSlices,
    received: PeerSlices,
    num_slots: int,
    empty: int,
    mesh: FoldedMesh,
) -> Shaped[Array, "slot width"]:
    """The rows that peers sent here, in a buffer of `num_slots` rows filled up with `empty`."""
    rows = vary(rows, mesh.ep)
    output = jnp.full((num_slots, rows.shape[1]), empty, rows.dtype)
    output = vary(output, tuple(varying(rows)))
    sizes = (sent.input_offsets, sent.sizes, sent.output_offsets, received.sizes)
    return lax.ragged_all_to_all(rows, output, *sizes, axis_name=mesh.ep)
