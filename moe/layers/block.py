"""Transformer block: the attention term and the feed-forward term, each with its norms."""

from dataclasses import replace

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.attention.delta import DeltaCore
from moe.attention.latent import LatentCore
from moe.attention.layer import CoreAttention, attention, norm_after, norm_before
from moe.config import Model
from moe.experts.dispatch.choice import dispatch
from moe.experts.feed_forward import dense_term
from moe.implementations import selected_implementation
from moe.remat import STREAM
from moe.router.layer import capacity_of, route
from moe.router.statistics import RouterStatistics
from moe.tokens.packing import PackedBatch
from moe.weights import Layer
from sharding.collectives import local_shard, vary


def feed_forward(
    layer: Layer[Array], x: Float[Array, "local d_model"], packed: PackedBatch, model: Model
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """The feed-forward term of a block: routed experts, the dense or shared expert, or both.

    Args:
      x: the residual stream, this rank's shard.
      packed: all the gathered tokens; padding is never routed and never counted.
    """
    config, mesh = model.config, model.mesh
    h = norm_before(x, layer.norm, config)
    # Experts take the shards as they are: between attention's tp and the experts' ep nothing moves
    # (MoE parallel folding).
    out, stats = jnp.zeros_like(h), None
    if layer.experts is not None:
        routing, stats = route(layer.experts, h, packed, model)
        routed, overflow = dispatch(
            layer.experts,
            h,
            routing,
            mesh,
            config.execution,
            capacity=capacity_of(packed.zigzag, model),
            product=selected_implementation(model, "experts"),
            activation=config.activation,
        )
        if config.execution.buffer_factor is not None:
            stats = replace(stats, overflow=vary(overflow.astype(jnp.float32), mesh.axes))
        out = out + routed
    dense_out = dense_term(layer, h, mesh, config.activation)
    out = out if dense_out is None else out + dense_out
    return norm_after(out, layer.norm, layer.out_norm, config), stats


def block(
    layer: Layer[Array],
    x: Float[Array, "local d_model"],
    packed: PackedBatch,
    core_attention: CoreAttention | LatentCore | DeltaCore,
    model: Model,
    layer_index: int | Int[Array, ""],
) -> tuple[Float[Array, "local d_model"], RouterStatistics[Array] | None]:
    """Runs one block, the layer of index `layer_index` in the network."""
    positions = packed.rope or local_shard(packed.positions, model.mesh.cp)
    x = x + attention(layer.attention, x, positions, core_attention, model, layer_index)
    x = checkpoint_name(x, STREAM)
    out, stats = feed_forward(layer, x, packed, model)
    return x + out, stats
