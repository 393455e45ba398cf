"""Gated DeltaNet layer, from the normalised residual stream to the outputs of the heads.

A convolution and the gated delta rule (`moe.attention.delta.rule`) replace attention; the output of
each value head is normalised and multiplied by a gate of its own.

References:
  Yang et al., "Gated Delta Networks", 2024, section 3.4. https://arxiv.org/abs/2412.06464
  The order of the weights and the normalisation are those of Qwen3-Next.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moe.architecture.delta import GatedDeltaNet
from moe.attention.delta.sequences import DeltaCore, Mixed
from moe.attention.projections import heads
from moe.config import ModelConfig
from moe.precision import rms_norm
from moe.remat import PROJECTED
from moe.weights import DeltaNet
from sharding.collectives import local_shard
from sharding.folding import FoldedMesh


def delta_heads(
    weights: DeltaNet[Array],
    h: Float[Array, "token d_model"],
    core: DeltaCore,
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Float[Array, "token value_heads value_dim"]:
    """Outputs of the value heads of this ``tp`` rank, before the output projection.

    Args:
      h: normalised tokens, all of this rank's sequences.
    """
    delta = config.delta
    assert delta is not None  # the table gives these weights only with it
    projected = checkpoint_name(heads(h, weights.inward), PROJECTED)
    pair = checkpoint_name(heads(h, weights.strength_and_decay), PROJECTED)
    content, gate = jnp.split(projected, [delta.content_dim], axis=-1)
    strength, rate = jnp.split(pair.astype(jnp.float32), 2, axis=-1)
    bias, log_rate = (
        x.reshape(1, -1, delta.values_per_key) for x in (weights.rate_bias, weights.log_rate)
    )
    log_decay = -jnp.exp(log_rate) * jax.nn.softplus(rate + bias)
    mixed = Mixed(content, log_decay, jax.nn.sigmoid(strength))
    read, _ = core.run(mixed, _filters(weights.filters, delta, mesh))
    normed = _rms_normalise(read, weights.read_norm, config)
    gate = gate.reshape(read.shape).astype(jnp.float32)
    return (normed * jax.nn.silu(gate)).astype(h.dtype)


def _rms_normalise(read: Array, scale: Array, config: ModelConfig) -> Array:
    flat = rms_norm(read.reshape(-1, read.shape[-1]), scale, config.norm_epsilon)
    return flat.reshape(read.shape)


def _filters(
    filters: Float[Array, "channel width"], delta: GatedDeltaNet, mesh: FoldedMesh
) -> Float[Array, "key_heads head_channel width"]:
    """Convolution filters of the key heads of this ``tp`` rank, float32. In `filters` all channels
    of queries come first, then all of keys, then all of values."""
    wide = filters.astype(jnp.float32)
    keys = delta.num_key_heads * delta.key_head_dim
    by_head = [
        local_shard(part.reshape(delta.num_key_heads, -1, part.shape[-1]), mesh.tp)
        for part in jnp.split(wide, [keys, 2 * keys], axis=0)
    ]
    return jnp.concatenate(by_head, axis=1)
