"""Projections from the normalised residual stream to queries, keys and values, and the output
projection."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moe.adapters import Matrix, product
from moe.attention.rotary import Positions, apply_rotary
from moe.config import Model, ModelConfig
from moe.remat import PROJECTED
from moe.weights import Attention
from sharding.collectives import all_sum

Heads = Float[Array, "token _heads _width"]
"""Queries, keys and values may differ in heads and in width."""


def queries_keys_values(
    weights: Attention[Array],
    h: Float[Array, "token d_model"],
    positions: Positions,
    model: Model,
    layer_index: int | Int[Array, ""],
) -> tuple[Heads, Heads, Heads, Heads | None]:
    """Queries and keys with rotary positions, and values, for the heads of this ``tp`` rank: one
    matrix each, with the biases and norms that the weights have. The fourth is the gate of the
    heads' outputs, projected with the queries; None in a network without it.

    Args:
      h: normalised tokens, all of this rank's sequences.
    """
    config = model.config
    query = heads(h, weights.query, weights.query_bias)
    key = heads(h, weights.key, weights.key_bias)
    value = heads(h, weights.value, weights.value_bias)
    query, key, value = (checkpoint_name(x, PROJECTED) for x in (query, key, value))
    gate = None
    if config.attention_gate:
        query, gate = jnp.split(query, 2, axis=-1)
    query = _normalise(query, weights.query_norm, config.num_heads, model)
    key = _normalise(key, weights.key_norm, config.num_kv_heads, model)
    return (
        scale_queries(apply_rotary(query, positions, config, layer_index), config),
        apply_rotary(key, positions, config, layer_index),
        value,
        gate,
    )


def heads(
    h: Float[Array, "token inner"],
    matrix: Float[Array, "inner heads width"] | Matrix,
    bias: Float[Array, "heads width"] | None = None,
) -> Heads:
    """``h W + b`` for each head."""
    out = product(_per_head, h, matrix, dot_b=_per_head)
    return out if bias is None else out + bias.astype(h.dtype)[None]


def _per_head(h: Array, matrix: Array) -> Array:
    return jnp.einsum("nd,dhk->nhk", h, matrix.astype(h.dtype))


def join_heads(x: Heads, matrix: Float[Array, "heads width outer"] | Matrix) -> Array:
    """``sum_h x_h W_h`` over the heads of this ``tp`` rank."""
    return product(_sum_over_heads, x, matrix, dot_a=_sum_over_heads)


def _sum_over_heads(x: Array, matrix: Array) -> Array:
    return jnp.einsum("nhk,hkd->nd", x, matrix.astype(x.dtype))


def _normalise(x: Heads, scale: Array | None, num_heads: int, model: Model) -> Heads:
    """RMSNorm of each head, or of the `num_heads` heads of all ``tp`` ranks together.

    The second kind sums a number per token over ``tp``.
    """
    if scale is None:
        return x
    wide = x.astype(jnp.float32)
    if model.config.query_key_norm == "head":
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = scale[None]
    else:
        local_sum = jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True)
        mean_square = all_sum(local_sum, model.mesh.tp) / (num_heads * x.shape[-1])
    normed = wide * jax.lax.rsqrt(mean_square + model.config.norm_epsilon)
    return (normed * scale[None]).astype(x.dtype)


def scale_queries(query: Heads, config: ModelConfig) -> Heads:
    """Queries times the score factor of the rotary scaling (YaRN's ``mscale_all_dim``)."""
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.score_factor
    return query if factor == 1.0 else query * factor
