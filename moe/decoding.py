"""The key/value cache and the one-token step.

The cache is one buffer per layer, key and value, written in place: a loop that carries it never
copies it. Rows are right-aligned prompts, so every row writes the same column at the same time.
"""

from dataclasses import replace
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from moe.attention.plain import plain_attention
from moe.config import ModelConfig
from moe.head import logits_of
from moe.model import block, check_window, embed, run
from moe.precision import rms_norm
from moe.tokens.packing import PackedBatch, pack_rows
from moe.tokens.zigzag import ZigzagLayout
from moe.weights import Layer, Transformer
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


@struct.dataclass
class Cache(Generic[Leaf]):
    """Keys and values of the positions so far, a buffer per layer.

    Attributes:
      keys: per layer ``[batch, kv_head, length, head_dim]``, rotated. A head's positions lie
        together, as the products of a decoding step want them: in another order each step would
        copy the buffer.
      values: the same shape, `v_head_dim` wide. Latent attention keeps what it expands.
      valid: ``[batch, length]`` which columns hold a token.
    """

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]
    valid: Leaf


def prefill(
    weights: Transformer[Array],
    tokens: Int[Array, "batch prompt"],
    valid: Bool[Array, "batch prompt"],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local d_model"], Cache[Array]]:
    """Runs the prompts and keeps their keys and values.

    Returns:
      The hidden states of this rank's shard of the flattened prompt tokens, and a cache as long as
      the prompt.

    Raises:
      ValueError: on a layout with ``cp``: a cache holds whole rows.
    """
    if mesh.layout.cp > 1:
        raise ValueError(
            f"layout {mesh.layout}: a cache of keys and values holds whole rows, so decoding runs "
            "without context parallelism; cp must be 1."
        )
    # No backward pass follows, and what is captured here would not leave a rematerialised layer.
    execution = replace(config.execution, remat="none", fsdp=False)
    config = replace(_dropless(config), execution=execution)
    check_window(tokens.shape[1], config)
    captured: dict[int, tuple[Array, ...]] = {}
    packed = pack_rows(tokens, valid, mesh, config.execution)

    def core_attention_of_layer(index):
        def core_attention(query, key, value, scale=None):
            captured[index] = tuple(
                _by_head(x.reshape(*valid.shape, *x.shape[1:])) for x in (key, value)
            )
            return packed.core_attention_of_layer(index)(query, key, value, scale)

        return core_attention

    x, _ = run(
        weights, packed._replace(core_attention_of_layer=core_attention_of_layer), config, mesh
    )
    keys, values = zip(*(captured[index] for index in range(config.num_layers)), strict=True)
    return x, Cache(keys, values, valid)


def extend(cache: Cache[Array], length: int, num_samples: int) -> Cache[Array]:
    """A cache with room for `length` more columns, each row repeated `num_samples` times in a
    row."""

    def grow(buffer, axis):
        padding = [(0, length if n == axis else 0) for n in range(buffer.ndim)]
        return jnp.pad(jnp.repeat(buffer, num_samples, axis=0), padding)

    return Cache(
        keys=tuple(grow(keys, axis=2) for keys in cache.keys),
        values=tuple(grow(values, axis=2) for values in cache.values),
        valid=grow(cache.valid, axis=1),
    )


def decode_step(
    layers: tuple[Layer[Array], ...],
    weights: Transformer[Array],
    cache: Cache[Array],
    tokens: Int[Array, "batch"],
    column: Int[Array, ""],
    live: Bool[Array, "batch"],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> tuple[Float[Array, "local vocab"], Cache[Array]]:
    """Appends one token to every row and scores the next.

    Args:
      layers: the layers of `weights`, taken apart once outside the loop.
      cache: written at `column`, in place when the caller gives it up.
      tokens: the tokens to append.
      column: where they go, the same for all rows.
      live: rows that are still going; the others append padding.

    Returns:
      Logits of this ``tp`` rank's shard of the rows, and the cache.
    """
    config = _dropless(config)
    check_window(cache.valid.shape[1], config)
    # Prompts are padded on the left, so a token's position is the count of valid ones before it.
    valid = jax.lax.dynamic_update_slice(cache.valid, live[:, None], (0, column))
    positions = jnp.maximum(jnp.sum(valid.astype(jnp.int32), axis=1) - 1, 0)
    visible = valid[:, None, :]
    keys, values = list(cache.keys), list(cache.values)

    def core_attention_of_layer(index):
        def core_attention(query, key, value, scale=None):
            start = (0, 0, column, 0)
            keys[index] = jax.lax.dynamic_update_slice(keys[index], key[:, :, None], start)
            values[index] = jax.lax.dynamic_update_slice(values[index], value[:, :, None], start)
            key, value = _by_position(keys[index]), _by_position(values[index])
            return plain_attention(query[:, None], key, value, visible, scale)[:, 0]

        return core_attention

    packed = PackedBatch(
        tokens=tokens,
        positions=positions,
        multiplicity=live.astype(jnp.float32),
        core_attention_of_layer=core_attention_of_layer,
        sequence_fractions=lambda counts: counts,  # nothing is learned here
        zigzag=ZigzagLayout(((tokens.shape[0], 1),), ranks=1),
    )
    # No loop over stacked layers: each one's cache is a buffer of its own, written in place.
    x = embed(weights, tokens, config, mesh)
    for index, layer in enumerate(layers):
        x, _ = block(layer, x, packed, core_attention_of_layer(index), config, mesh)
    x = rms_norm(x, weights.norm, config.norm_epsilon)
    return logits_of(weights, x, config, mesh), Cache(tuple(keys), tuple(values), valid)


def _dropless(config: ModelConfig) -> ModelConfig:
    """Which tokens are dropped depends on what else is in the batch; generation drops none."""
    return replace(config, capacity_factor=None)


def _by_head(
    x: Float[Array, "batch length kv_head head_dim"],
) -> Float[Array, "batch kv_head length head_dim"]:
    return jnp.swapaxes(x, 1, 2)


def _by_position(
    x: Float[Array, "batch kv_head length head_dim"],
) -> Float[Array, "batch length kv_head head_dim"]:
    return jnp.swapaxes(x, 1, 2)
