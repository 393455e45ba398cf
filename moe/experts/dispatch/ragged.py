"""Ragged all-to-all token dispatcher: tokens are sent to the devices of their experts in slices of
dynamic length, without padding.

It uses `jax.lax.ragged_all_to_all` and its terms; CPU devices do not support it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.experts.dispatch.all_to_all import Compute, Peers
from moe.experts.dispatch.buffers import DispatchOptions, has_experts_at, slots_of
from moe.experts.permutation import permutation_kernel, permute_rows, unpermute_rows
from moe.ops.sorting import inverse_slots, positions_in, take_rows
from moe.remat import DISPATCHED
from moe.router.routing import Routing
from sharding import compression
from sharding.collectives import (
    COLLECTIVE,
    Axes,
    IndexGroups,
    gather_tokens,
    index_in_group,
    match_varying,
    vary,
)
from sharding.compression import decode, decode_tokens, e4m3_scale, encode, encode_tokens


class Links(NamedTuple):
    """Mesh axes and groups of an exchange, and the number of slices in which a peer gets its rows.

    Attributes:
      axes: of the mesh.
      groups: of the peers, as in `sharding.collectives.all_to_all`.
      parts: slices for each peer. XLA's kernel for GPUs copies a slice with one block of threads.
    """

    axes: Axes
    groups: IndexGroups | None = None
    parts: int = 1


class PeerSlices(NamedTuple):
    """One side of a ragged all-to-all, an entry per peer.

    Attributes:
      input_offsets: first row of the slice for each peer in the local buffer.
      sizes: number of rows of the slice.
      output_offsets: first row of the slice in the peer's buffer.
    """

    input_offsets: Array
    sizes: Array
    output_offsets: Array


class ExchangePlan(NamedTuple):
    """Slices of an exchange from one buffer to another, and of its reverse.

    Attributes:
      sent: slices that are sent, by offsets in the local buffer.
      received: slices of the reverse exchange, by offsets in the other buffer.
      groups_sent, groups_received: the same for the groups of rows that share a scale backward.
    """

    sent: PeerSlices
    received: PeerSlices
    groups_sent: PeerSlices
    groups_received: PeerSlices

    @property
    def reverse(self) -> "ExchangePlan":
        return ExchangePlan(self.received, self.sent, self.groups_received, self.groups_sent)


def plan_exchange(
    counts: Int[Array, "peer peer"], num_slots: int, rank: Int[Array, ""]
) -> ExchangePlan:
    """Slices of `peer_slices`, and the slices of their scale groups."""
    at_receiver = jnp.minimum(jnp.cumsum(counts, axis=0) - counts, num_slots)
    group_counts = -(-jnp.minimum(counts, num_slots - at_receiver) // compression.GROUP_TOKENS)
    group_slots = num_groups(num_slots, counts.shape[0])
    return ExchangePlan(
        *peer_slices(counts, num_slots, rank), *peer_slices(group_counts, group_slots, rank)
    )


def num_groups(rows: int, peers: int) -> int:
    """Largest number of scale groups in slices of `rows` rows: one group of each peer may be
    short."""
    return rows // compression.GROUP_TOKENS + peers


def peer_slices(
    counts: Int[Array, "peer peer"], num_slots: int, rank: Int[Array, ""]
) -> tuple[PeerSlices, PeerSlices]:
    """Slices that are sent to each peer, and slices that are sent back.

    Args:
      counts: number of rows from each device (first axis) to each (second axis); the sender's
        buffer is in the order of receivers.
      num_slots: capacity of a receiver in rows; its buffer is in the order of senders.
      rank: of this device among its peers.
    """
    at_sender = jnp.cumsum(counts, axis=1) - counts
    at_receiver = jnp.minimum(jnp.cumsum(counts, axis=0) - counts, num_slots)
    # Overflow is not sent; the offsets in the sender's buffer stay the same.
    counts = jnp.minimum(counts, num_slots - at_receiver)
    return (
        PeerSlices(at_sender[rank], counts[rank], at_receiver[rank]),
        PeerSlices(at_receiver[:, rank], counts[:, rank], at_sender[:, rank]),
    )


def exchange_rows(
    rows: Float[Array, "row width"],
    plan: ExchangePlan,
    num_slots: int,
    name: str,
    links: Links,
    comm_dtype: str | None = None,
) -> Float[Array, "slot width"]:
    """Sends rows to peers, and returns the received ones in a buffer of `num_slots` rows, padded
    with zeros.

    Args:
      name: checkpoint name of the result, for `moe.remat`.
      comm_dtype: communication dtype. None is the rows' dtype; FP8 sends bytes and a scale for
        each row, and backward a scale for each channel of a group of rows (`sharding.compression`).
    """
    rows = vary(rows, links.axes)
    plan = match_varying(plan, rows)
    sizes = num_slots, rows.shape[0]
    if comm_dtype is None:
        return _exchange_plain(rows, plan, *sizes, links, name)
    return _exchange_fp8(rows, plan, *sizes, rows.dtype, links, name)


def split_slices(slices: PeerSlices, parts: int) -> PeerSlices:
    """Each slice as `parts` slices that follow one another and differ by one row at most."""
    each, more = jnp.divmod(slices.sizes[:, None], parts)
    part = jnp.arange(parts)[None]
    before = part * each + jnp.minimum(part, more)
    return PeerSlices(
        (slices.input_offsets[:, None] + before).reshape(-1),
        jnp.where(part < more, each + 1, each).reshape(-1),
        (slices.output_offsets[:, None] + before).reshape(-1),
    )


def _exchange_slices(
    rows: Array,
    sent: PeerSlices,
    received: PeerSlices,
    num_slots: int,
    links: Links,
    name: str = COLLECTIVE,
) -> Array:
    sent, received = (split_slices(slices, links.parts) for slices in (sent, received))
    output = jnp.zeros((num_slots, rows.shape[1]), rows.dtype)
    output = match_varying(output, rows)
    sizes = (sent.input_offsets, sent.sizes, sent.output_offsets, received.sizes)
    result = lax.ragged_all_to_all(
        rows, output, *sizes, axis_name=links.axes, axis_index_groups=links.groups
    )
    return checkpoint_name(result, name)


# JAX's own gradient exchanges offsets, which the plan has, and without regard to groups.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _exchange_plain(
    rows: Array, plan: ExchangePlan, num_slots: int, num_rows: int, links: Links, name: str
) -> Array:
    return _exchange_slices(rows, plan.sent, plan.received, num_slots, links, name)


def _forward_plain(rows, plan, num_slots, num_rows, links, name):
    return _exchange_plain(rows, plan, num_slots, num_rows, links, name), plan


def _backward_plain(num_slots, num_rows, links, name, plan, gradient):
    slices = plan.reverse.sent, plan.reverse.received
    return _exchange_slices(gradient, *slices, num_rows, links), None


_exchange_plain.defvjp(_forward_plain, _backward_plain)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _exchange_fp8(
    rows: Array,
    plan: ExchangePlan,
    num_slots: int,
    num_rows: int,
    dtype: Any,
    links: Links,
    name: str,
) -> Array:
    return _forward(rows, plan, num_slots, num_rows, dtype, links, name)[0]


def _forward(rows, plan, num_slots, num_rows, dtype, links, name):
    content, scales = (
        _exchange_slices(array, plan.sent, plan.received, num_slots, links, name)
        for array in encode_tokens(rows)
    )
    return decode_tokens((content, scales)).astype(dtype), plan


def _backward(num_slots, num_rows, dtype, links, name, plan, gradient):
    peers, reverse = plan.sent.sizes.shape[0], plan.reverse
    group_slots = num_groups(num_slots, peers)
    group = _group_of_rows(num_slots, reverse.sent, reverse.groups_sent, group_slots)
    magnitude = jnp.abs(gradient.astype(jnp.float32))
    largest = jax.ops.segment_max(magnitude, group, group_slots + 1, indices_are_sorted=False)
    # `segment_max` gives the lowest number for a group without rows.
    scales = e4m3_scale(jnp.maximum(largest, 0))
    content = encode(gradient, scales[group])
    exchange = partial(_exchange_slices, links=links)
    returned = exchange(content, reverse.sent, reverse.received, num_rows)
    group_slots = num_groups(num_rows, peers)
    scales = exchange(scales[:-1], reverse.groups_sent, reverse.groups_received, group_slots)
    group = _group_of_rows(num_rows, reverse.received, reverse.groups_received, group_slots)
    row_scales = jnp.take(scales, group, axis=0, mode="fill", fill_value=0)
    return decode(returned, row_scales).astype(dtype), None


_exchange_fp8.defvjp(_forward, _backward)


def _group_of_rows(
    num_rows: int, slices: PeerSlices, groups: PeerSlices, no_group: int
) -> Int[Array, "row"]:
    """Scale group of each row of a buffer, `no_group` for rows in no slice."""
    row = jnp.arange(num_rows)
    # Of slices that start at the same row, all but the last are empty.
    peer = positions_in(slices.input_offsets, row, "right") - 1
    within = row - slices.input_offsets[peer]
    group = groups.input_offsets[peer] + within // compression.GROUP_TOKENS
    return jnp.where(within < slices.sizes[peer], group, no_group)


def exchange_slices(
    x: Float[Array, "local d_model"],
    routing: Routing,
    peers: Peers,
    compute: Compute,
    options: DispatchOptions,
) -> tuple[Float[Array, "local d_model"], Int[Array, ""]]:
    """`moe.experts.dispatch.all_to_all.exchange_tokens` in slices of dynamic length, without empty
    slots: space that one sender leaves free in a peer's buffer another may use.

    The routing is gathered first; from it each device computes what it will receive.

    Communication per device and layer, forward: an all-gather of the routing of the peers, ``2 T k
    (number - 1)`` numbers; each token once to each other peer with some of its experts and back:
    over ``ep``, with balanced routing, at most ``2 T k (ep - 1) / ep`` of them.
    """
    mesh, (num_tokens, k) = options.mesh, routing.experts.shape
    num_slots, num_peers = peers.number * peers.slots, peers.number

    experts, probs = (gather_tokens(array, mesh.ep, groups=peers.groups) for array in routing)
    is_sent = has_experts_at(experts - peers.first, peers.num_local, num_peers)
    # Tokens from each device (first axis) to each device (second axis).
    counts = jnp.sum(is_sent.reshape(num_peers, num_tokens, num_peers), axis=1, dtype=jnp.int32)
    rank = index_in_group(mesh.ep, peers.groups)
    plan = plan_exchange(counts, num_slots, rank)
    # A slice for each expert of a peer.
    links = Links(mesh.ep, peers.groups, peers.num_local)
    comm_dtype = options.execution.activation_wire
    exchange = partial(exchange_rows, links=links, comm_dtype=comm_dtype)

    # One peer after the other, each one's tokens in their own order.
    is_sent_here = has_experts_at(routing.experts - peers.first, peers.num_local, num_peers)
    position = plan.sent.input_offsets[None] + jnp.cumsum(is_sent_here, axis=0) - 1
    most = num_tokens * min(k, num_peers)
    token, slots = slots_of(jnp.where(is_sent_here, position, most), most, k)
    kernels = permutation_kernel(options.product)
    rows = permute_rows(x, token, slots, None, kernels)
    rows = exchange(rows, plan, num_slots, DISPATCHED)

    # The slots of the tokens that come here, in the order in which their senders have them.
    is_received = is_sent[:, rank]
    slot = jnp.where(is_received, jnp.cumsum(is_received) - 1, num_slots)
    received_token = inverse_slots(slot, num_slots)
    ids = jnp.where(
        received_token[:, None] < experts.shape[0],
        take_rows(experts, received_token),
        peers.num_experts,
    )
    probs = permute_rows(probs, received_token, slot[:, None])
    outputs, overflow = compute(rows, ids, probs)

    returned = exchange(outputs, plan.reverse, most, COLLECTIVE)
    out = unpermute_rows(returned, slots, token, kernels).astype(x.dtype)
    return out, overflow + jnp.maximum(jnp.sum(is_received) - num_slots, 0)
