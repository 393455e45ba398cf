"""Reference implementations, and inputs, that tests of several files share."""

import jax
import jax.numpy as jnp

from moe.disaggregated.placement import Placement
from moe.experts.gated import apply_activation


def dense_reference(weights, x, experts, probs, activation="silu"):
    """Reference of `moe.experts.feed_forward.routed_experts`: every token through every expert, and
    the
    outputs multiplied by the gate weights."""
    gate, up = (
        jnp.einsum("nd,edf->nef", x, weights.gate_up[:, :, half].astype(x.dtype))
        for half in range(2)
    )
    if weights.gate_up_bias is not None:
        gate = gate + weights.gate_up_bias[None, :, 0].astype(x.dtype)
        up = up + weights.gate_up_bias[None, :, 1].astype(x.dtype)
    hidden = apply_activation(gate, up, activation)
    out = jnp.einsum("nef,efd->ned", hidden, weights.down.astype(x.dtype))
    if weights.down_bias is not None:
        out = out + weights.down_bias[None].astype(x.dtype)
    combine_weights = jax.nn.one_hot(experts, weights.down.shape[0], dtype=jnp.float32)
    combine_weights = jnp.einsum("nke,nk->ne", combine_weights, probs)
    return jnp.einsum("ne,ned->nd", combine_weights, out.astype(jnp.float32))


def causal_mask(valid):
    """Causal mask without padding: each position sees itself and earlier ones that are valid."""
    time = valid.shape[1]
    order = jnp.arange(time)
    return valid[:, None, :] & (order[:, None] >= order[None, :])[None]


def placement_of(replicas, num_devices):
    """Placement from the (device, slot) pairs of each expert, which fill all slots."""
    experts = {pair: expert for expert, slots in enumerate(replicas) for pair in slots}
    return Placement(tuple(experts[pair] for pair in sorted(experts)), num_devices)
