"""What lies between the normalised residual stream and queries, keys and values: two kinds of
attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.attention.rotary import rope
from moe.config import ModelConfig
from moe.precision import rms_norm
from moe.weights import Attention, LatentAttention
from sharding.collectives import all_sum
from sharding.folding import FoldedMesh

Heads = Float[Array, "token _heads _width"]
"""Queries, keys and values may differ in heads and in width."""


def queries_keys_values(
    weights: Attention[Array] | LatentAttention[Array],
    h: Float[Array, "token d_model"],
    positions: Int[Array, "token"],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Heads, Heads, Heads]:
    """Queries and keys, rotated, and values, for the heads of this ``tp`` rank.

    Args:
      h: normalised tokens, all of this rank's sequences.
      positions: place of each in its own sequence, from 0.
    """
    if isinstance(weights, LatentAttention):
        return _latent(weights, h, positions, config)
    return _grouped(weights, h, positions, config, mesh)


def _grouped(
    weights: Attention[Array],
    h: Float[Array, "token d_model"],
    positions: Int[Array, "token"],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Heads, Heads, Heads]:
    """A matrix each, with the biases and the norms that the weights have."""
    query = _heads(h, weights.query, weights.query_bias)
    key = _heads(h, weights.key, weights.key_bias)
    value = _heads(h, weights.value, weights.value_bias)
    query = _normalised(query, weights.query_norm, config.num_heads, config, mesh)
    key = _normalised(key, weights.key_norm, config.num_kv_heads, config, mesh)
    return (
        _sharpened(_rotated(query, positions, config), config),
        _rotated(key, positions, config),
        value,
    )


def _latent(
    weights: LatentAttention[Array],
    h: Float[Array, "token d_model"],
    positions: Int[Array, "token"],
    config: ModelConfig,
) -> tuple[Heads, Heads, Heads]:
    """Multi-head latent attention: keys and values expanded from one narrow vector per token.

    ``c = norm(h W_c)``, ``[k_h ; v_h] = c W_h``; the part of a key that knows its position,
    ``rope(h W_r)``, is one for all heads and laid beside each ``k_h``. Queries may come from a
    narrow vector of their own. The vectors are computed on every ``tp`` rank, without
    communication.

    References:
      DeepSeek-AI, "DeepSeek-V2", 2024, eq. 37 to 47. https://arxiv.org/abs/2405.04434
    """
    mla = config.mla
    assert mla is not None  # the table gives these weights only with it
    narrow = h
    if weights.query_down is not None and weights.query_norm is not None:
        narrow = h @ weights.query_down.astype(h.dtype)
        narrow = rms_norm(narrow, weights.query_norm, config.norm_epsilon)
    content_dim = config.head_dim - mla.qk_rope_head_dim
    query = _heads(narrow, weights.query, None)
    query = jnp.concatenate(
        [query[..., :content_dim], _rotated(query[..., content_dim:], positions, config)], axis=-1
    )
    down = h @ weights.down.astype(h.dtype)
    shared = _rotated(down[:, None, mla.kv_lora_rank :], positions, config)
    content = rms_norm(down[:, : mla.kv_lora_rank], weights.down_norm, config.norm_epsilon)
    expanded = _heads(content, weights.up, None)
    shared = jnp.broadcast_to(shared, (*expanded.shape[:2], mla.qk_rope_head_dim))
    key = jnp.concatenate([expanded[..., :content_dim], shared], axis=-1)
    return _sharpened(query, config), key, expanded[..., content_dim:]


def _heads(
    h: Float[Array, "token inner"],
    matrix: Float[Array, "inner heads width"],
    bias: Float[Array, "heads width"] | None,
) -> Heads:
    out = jnp.einsum("nd,dhk->nhk", h, matrix.astype(h.dtype))
    return out if bias is None else out + bias.astype(h.dtype)[None]


def _normalised(
    x: Heads, scale: Array | None, num_heads: int, config: ModelConfig, mesh: FoldedMesh
) -> Heads:
    """RMSNorm of each head, or of the `num_heads` heads of all ``tp`` ranks together.

    The second kind sums a number per token over ``tp``.
    """
    if scale is None:
        return x
    wide = x.astype(jnp.float32)
    if config.query_key_norm == "head":
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = scale[None]
    else:
        own = jnp.sum(jnp.square(wide), axis=(-2, -1), keepdims=True)
        mean_square = all_sum(own, mesh.tp) / (num_heads * x.shape[-1])
    return (wide * jax.lax.rsqrt(mean_square + config.norm_epsilon) * scale[None]).astype(x.dtype)


def _rotated(x: Heads, positions: Int[Array, "token"], config: ModelConfig) -> Heads:
    return rope(x, positions, config.rope_base, config.rope_scaling, config.rope_interleaved)


def _sharpened(query: Heads, config: ModelConfig) -> Heads:
    """Queries times what the rotary scaling asks of the scores."""
    sharpness = 1.0 if config.rope_scaling is None else config.rope_scaling.sharpness
    return query if sharpness == 1.0 else query * sharpness
