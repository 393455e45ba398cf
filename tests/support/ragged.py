"""A ragged all-to-all for CPU devices, which have none."""

import itertools

import jax.numpy as jnp
from jax import lax

from sharding.collectives import index_in_group


def ragged_by_gathering(
    operand,
    output,
    input_offsets,
    send_sizes,
    output_offsets,
    recv_sizes,
    *,
    axis_name,
    axis_index_groups=None,
):
    """`jax.lax.ragged_all_to_all` as its documentation states it, by gathering everything."""
    me = index_in_group(axis_name, axis_index_groups)
    everything = [
        lax.all_gather(x, axis_name, axis_index_groups=axis_index_groups)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    ]
    place, num_peers = jnp.arange(output.shape[0]), everything[0].shape[0]
    # Equally many slices for each peer, one peer after the other.
    slices = input_offsets.shape[0] // num_peers
    for peer, part in itertools.product(range(num_peers), range(slices)):
        sent, start, size, offset = (x[peer] for x in everything)
        start, size, offset = (x[me * slices + part] for x in (start, size, offset))
        own = (place >= offset) & (place < offset + size)
        rows = sent[jnp.clip(place - offset + start, 0, sent.shape[0] - 1)]
        # A peer's announcement and ours must agree, or rows are lost on real devices.
        own = own & (size == recv_sizes[peer * slices + part])
        output = jnp.where(own[:, None], rows, output)
    return output
