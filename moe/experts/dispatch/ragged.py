"""Rows go to the devices of their experts in pieces as long as they are; not on CPU."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from moe.experts.dispatch.all_to_all import room, whole_experts
from moe.experts.permutation import inverse_places, spread_rows, take_rows
from moe.precision import weighted_sum
from moe.router.routing import Routing
from moe.weights import Experts
from sharding.collectives import gather_tokens, vary, varying
from sharding.folding import FoldedMesh


class Pieces(NamedTuple):
    """One side of a ragged exchange, an entry per peer along ``ep``.

    Attributes:
      start: first row of the piece for each peer in the own buffer.
      size: its rows.
      there: where it goes in the peer's buffer.
    """

    start: Array
    size: Array
    there: Array


def ragged(
    weights: Experts[Array],
    x: Float[Array, "local d_model"],
    routing: Routing,
    mesh: FoldedMesh,
    capacity: int | None = None,
    product: str | None = None,
) -> Float[Array, "local d_model"]:
    """As `moe.experts.dispatch.all_to_all.all_to_all`, with nothing but chosen rows on the wire.

    Communication per device and layer, forward: the rows chosen elsewhere out and back, with even
    routing ``2 T k (ep - 1) / ep``, their ids (one int32 a row) out, and an all-gather of ``ep``
    counts. Over ``etp`` whole buffers travel, ``2 R ep (etp - 1)`` rows with the room R of `room`.
    """
    num_local, num_peers = weights.gate.shape[0], mesh.size(mesh.ep)
    num_tokens, k = routing.experts.shape
    experts = routing.experts.reshape(-1)
    # Grouped by expert and so by peer; what goes nowhere has the largest id and comes last.
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.sum((experts // num_local)[:, None] == jnp.arange(num_peers)[None, :], axis=0)
    parcel = room(num_tokens, k, num_local, capacity)
    outward, homeward = pieces(sizes, parcel, mesh)

    buffer = num_peers * parcel
    rows = send(spread_rows(x, order // k, x.dtype), outward, homeward, buffer, 0, mesh)
    ids = (experts % num_local)[order][:, None].astype(jnp.int32)
    ids = send(ids, outward, homeward, buffer, num_local, mesh)[:, 0]

    done = whole_experts(weights, rows, ids, mesh, product)

    back = send(done, homeward, outward, num_tokens * k, 0, mesh)
    out = take_rows(back, inverse_places(order, num_tokens * k)).reshape(num_tokens, k, -1)
    return weighted_sum(routing.weights, out).astype(out.dtype)


def pieces(sizes: Int[Array, "peer"], room: int, mesh: FoldedMesh) -> tuple[Pieces, Pieces]:
    """What is sent to each peer, and what is sent back.

    Args:
      sizes: rows for each peer, which stand one peer after the other.
      room: rows of them that are sent at most, the first ones.
    """
    # Rows from each device (first axis) to each device (second axis).
    counts = gather_tokens(sizes.astype(jnp.int32)[None], mesh.ep)
    # In the sender's buffer pieces stand by receiver, in the receiver's by sender.
    at_sender = jnp.cumsum(counts, axis=1) - counts
    counts = jnp.minimum(counts, room)
    at_receiver = jnp.cumsum(counts, axis=0) - counts
    own = lax.axis_index(mesh.ep)
    return (
        Pieces(at_sender[own], counts[own], at_receiver[own]),
        Pieces(at_receiver[:, own], counts[:, own], at_sender[:, own]),
    )


def send(
    rows: Shaped[Array, "row width"],
    sent: Pieces,
    received: Pieces,
    buffer: int,
    empty: int,
    mesh: FoldedMesh,
) -> Shaped[Array, "place width"]:
    """The rows that peers sent here, in a buffer of `buffer` places filled up with `empty`."""
    rows = vary(rows, mesh.ep)
    output = jnp.full((buffer, rows.shape[1]), empty, rows.dtype)
    output = vary(output, tuple(varying(rows)))
    sizes = (sent.start, sent.size, sent.there, received.size)
    return lax.ragged_all_to_all(rows, output, *sizes, axis_name=mesh.ep)
