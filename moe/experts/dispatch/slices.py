"""Rows that go to peers in slices as long as they are, as they are or in FP8.

Words are those of `jax.lax.ragged_all_to_all`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from sharding import activation_wire
from sharding.activation_wire import by_token, from_bytes, of_tokens, scale_of, to_bytes
from sharding.collectives import COLLECTIVE, vary, varying
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


class Way(NamedTuple):
    """Slices from one buffer to another.

    Attributes:
      sent: as the own buffer has them.
      received: those that come back the same way, as the other has them.
      groups_sent, groups_received: the same of the groups of rows that share a scale backward.
    """

    sent: PeerSlices
    received: PeerSlices
    groups_sent: PeerSlices
    groups_received: PeerSlices

    @property
    def back(self) -> "Way":
        return Way(self.received, self.sent, self.groups_received, self.groups_sent)


def way_out(counts: Int[Array, "peer peer"], num_slots: int, mesh: FoldedMesh) -> Way:
    """The slices of `peer_slices`, and those of their groups."""
    at_receiver = jnp.minimum(jnp.cumsum(counts, axis=0) - counts, num_slots)
    groups = -(-jnp.minimum(counts, num_slots - at_receiver) // activation_wire.GROUP)
    room = num_groups(num_slots, mesh.size(mesh.ep))
    return Way(*peer_slices(counts, num_slots, mesh), *peer_slices(groups, room, mesh))


def num_groups(rows: int, peers: int) -> int:
    """Groups that slices of so many rows have at most: one of each peer may be short."""
    return rows // activation_wire.GROUP + peers


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
    way: Way,
    num_slots: int,
    name: str,
    mesh: FoldedMesh,
    wire: str | None = None,
) -> Float[Array, "slot width"]:
    """The rows that peers sent here, in a buffer of `num_slots` rows filled up with zeros.

    Args:
      name: of the result, for `moe.remat`.
      wire: None sends the rows as they are; else their bytes and a scale of each, and backward a
        scale for each channel of a group of rows (`sharding.activation_wire`).
    """
    rows = vary(rows, mesh.ep)
    if wire is None:
        return _moved(rows, way.sent, way.received, num_slots, mesh.ep, name)
    way = vary(way, tuple(varying(rows)))
    return _sent_fp8(rows, way, num_slots, rows.shape[0], rows.dtype, mesh.ep, name)


def _moved(
    rows: Array,
    sent: PeerSlices,
    received: PeerSlices,
    num_slots: int,
    axes: tuple[str, ...],
    name: str = COLLECTIVE,
) -> Array:
    output = jnp.zeros((num_slots, rows.shape[1]), rows.dtype)
    output = vary(output, tuple(varying(rows)))
    sizes = (sent.input_offsets, sent.sizes, sent.output_offsets, received.sizes)
    return checkpoint_name(lax.ragged_all_to_all(rows, output, *sizes, axis_name=axes), name)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _sent_fp8(
    rows: Array,
    way: Way,
    num_slots: int,
    num_rows: int,
    dtype: Any,
    axes: tuple[str, ...],
    name: str,
) -> Array:
    return _forward(rows, way, num_slots, num_rows, dtype, axes, name)[0]


def _forward(rows, way, num_slots, num_rows, dtype, axes, name):
    content, scales = (
        _moved(part, way.sent, way.received, num_slots, axes, name) for part in by_token(rows)
    )
    return of_tokens((content, scales)).astype(dtype), way


def _backward(num_slots, num_rows, dtype, axes, name, way, gradient):
    peers, home = way.sent.sizes.shape[0], way.back
    room = num_groups(num_slots, peers)
    group = _group_of_rows(num_slots, home.sent, home.groups_sent, room)
    magnitude = jnp.abs(gradient.astype(jnp.float32))
    largest = jax.ops.segment_max(magnitude, group, room + 1, indices_are_sorted=False)
    # A group without rows has the smallest number for its largest.
    scales = scale_of(jnp.maximum(largest, 0))
    content = to_bytes(gradient, scales[group])
    returned = _moved(content, home.sent, home.received, num_rows, axes)
    room = num_groups(num_rows, peers)
    scales = _moved(scales[:-1], home.groups_sent, home.groups_received, room, axes)
    group = _group_of_rows(num_rows, home.received, home.groups_received, room)
    of_rows = jnp.take(scales, group, axis=0, mode="fill", fill_value=0)
    return from_bytes(returned, of_rows).astype(dtype), None


_sent_fp8.defvjp(_forward, _backward)


def _group_of_rows(
    num_rows: int, slices: PeerSlices, groups: PeerSlices, none: int
) -> Int[Array, "row"]:
    """The group of each row of a buffer, `none` for rows in no slice."""
    row = jnp.arange(num_rows)
    # Of slices that begin at the same row all but the last are empty.
    peer = jnp.searchsorted(slices.input_offsets, row, side="right") - 1
    within = row - slices.input_offsets[peer]
    found = groups.input_offsets[peer] + within // activation_wire.GROUP
    return jnp.where(within < slices.sizes[peer], found, none)
