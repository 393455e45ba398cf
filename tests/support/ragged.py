"""A ragged all-to-all for CPU devices, which have none."""

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
    me, num_peers = index_in_group(axis_name, axis_index_groups), input_offsets.shape[0]
    everything = [
        lax.all_gather(x, axis_name, axis_index_groups=axis_index_groups)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    ]
    place = jnp.arange(output.shape[0])
    for peer in range(num_peers):
        sent, start, size, offset = (x[peer] for x in everything)
        start, size, offset = start[me], size[me], offset[me]
        own = (place >= offset) & (place < offset + size)
        rows = sent[jnp.clip(place - offset + start, 0, sent.shape[0] - 1)]
        # A peer's announcement and ours must agree, or rows are lost on real devices.
        own = own & (size == recv_sizes[peer])
        output = jnp.where(own[:, None], rows, output)
    return output
