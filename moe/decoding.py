"""The key/value cache and the one-token step.

A row's token at position p has its keys and values in column p, whatever the other rows do: rows
stand at different positions, and what a row computes does not depend on when it came. The cache is
one buffer per layer, key and value, written in place: a loop that carries it never copies it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from moe.attention.cached import cached_attention
from moe.attention.latent import LatentCore, absorbed, expanded, keeps_narrow, released
from moe.attention.mask import window_of_layer
from moe.config import ModelConfig
from moe.head import logits_of
from moe.model import block, embed, run
from moe.precision import rms_norm
from moe.tokens.packing import PackedBatch, pack_rows
from moe.tokens.zigzag import ZigzagLayout
from moe.weights import Layer, Transformer
from sharding.collectives import join_shards
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


@struct.dataclass
class Cache(Generic[Leaf]):
    """Keys and values of the tokens so far, a buffer per layer.

    Attributes:
      keys: per layer ``[row, kv_head, head_dim, column]``, rotated; values: ``[row, kv_head,
        column, v_head_dim]``. So the products of a decoding step want them: in another order each
        step would copy the buffers, or read them piece by piece. Latent attention has no values:
        its keys are the narrow vectors of all heads together, on each rank of ``tp``, unless
        `Execution.latent` is "expanded".
    """

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]


KEY_COLUMN, VALUE_COLUMN = 3, 2
"""Which axis of keys and of values the columns are."""


def over_columns(function: Callable[..., Leaf], *caches: Cache[Leaf]) -> Cache[Leaf]:
    """`function` of each buffer, or of those in the same place of several caches, and of the axis
    that its columns are."""
    keys = zip(*(cache.keys for cache in caches), strict=True)
    values = zip(*(cache.values for cache in caches), strict=True)
    return Cache(
        tuple(function(*buffers, KEY_COLUMN) for buffers in keys),
        tuple(function(*buffers, VALUE_COLUMN) for buffers in values),
    )


class Prefilled(NamedTuple):
    """What running rows of tokens leaves behind.

    Attributes:
      cache: as long as the rows, with rubbish in the columns after each row's tokens.
      states: ``[row, d_model]`` the last hidden state of each row's last token, the same on every
        rank of ``tp``.
      choices: ``[row, column, layer, k]`` the experts that each token chose, `num_experts` after
        each row's tokens; None where they were not asked for.
    """

    cache: Cache[Array]
    states: Array
    choices: Array | None


def prefill(
    weights: Transformer[Array],
    tokens: Int[Array, "row column"],
    lengths: Int[Array, "row"],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool = False,
) -> Prefilled:
    """Runs rows of tokens and keeps their keys and values.

    Args:
      tokens: a row's begin in its first column; what follows them is not looked at.
      lengths: tokens of each row.
      record_choices: whether to give the experts that each token chose.

    Raises:
      ValueError: on a layout with ``cp``: a cache holds whole rows.
    """
    if mesh.layout.cp > 1:
        raise ValueError(
            f"layout {mesh.layout}: a cache of keys and values holds whole rows, so decoding runs "
            "without context parallelism; cp must be 1."
        )
    # No backward pass follows, and what is captured here would not leave a rematerialised layer.
    execution = replace(config.execution, remat="none", fsdp=False, buffer_factor=None)
    config = replace(_dropless(config), execution=execution)
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    captured: dict[int, tuple[Array, ...]] = {}
    packed = pack_rows(tokens, valid, mesh, config.execution)

    def core_attention_of_layer(index, window=None):
        inner = packed.core_attention_of_layer(index, window)
        assert not isinstance(inner, LatentCore)

        def keep(*arrays: Array) -> None:
            captured[index] = tuple(
                jnp.moveaxis(x.reshape(*valid.shape, *x.shape[1:]), 1, column)
                for x, column in zip(arrays, (KEY_COLUMN, VALUE_COLUMN), strict=False)
            )

        def core_attention(query, key, value, scale=None):
            keep(key, value)
            return inner(query, key, value, scale)

        def of_narrow(query, narrow, up):
            keep(narrow[:, None])
            return inner(query, *expanded(narrow, up, config))

        return LatentCore(of_narrow) if keeps_narrow(config) else core_attention

    watched = packed._replace(
        core_attention_of_layer=core_attention_of_layer, record_choices=record_choices
    )
    x, router = run(weights, watched, config, mesh)
    keys, *values = zip(*(captured[index] for index in range(config.num_layers)), strict=True)
    (by_row,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    states, choices = jnp.take_along_axis(by_row, last, axis=1)[:, 0], None
    if record_choices:
        assert router is not None
        assert router.choices is not None
        by_token = join_shards(jnp.moveaxis(router.choices, 0, 1), mesh.sequence)
        (choices,) = packed.zigzag.restore(by_token)
    return Prefilled(Cache(keys, values[0] if values else ()), states, choices)


def decode_step(
    layers: tuple[Layer[Array], ...],
    weights: Transformer[Array],
    cache: Cache[Array],
    tokens: Int[Array, "row"],
    positions: Int[Array, "row"],
    live: Bool[Array, "row"],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool = False,
) -> tuple[Float[Array, "local vocab"], Cache[Array], Int[Array, "row layer k"] | None]:
    """Appends one token to every live row and scores the next.

    Args:
      layers: the layers of `weights`, taken apart once outside the loop.
      cache: of live rows written at `positions`, in place when the caller gives it up; other rows
        stay as they are.
      tokens: the tokens to append.
      positions: where in its row each token stands, from 0; less than the cache's columns.
      live: rows that are going; what is computed for the others is rubbish.
      record_choices: whether to give the experts that each token chose.

    Returns:
      Logits of this ``tp`` rank's shard of the rows, the cache, and the choices, `num_experts`
      where a row is not live; None where they were not asked for.
    """
    config = _dropless(config)
    room = cache.keys[0].shape[KEY_COLUMN]
    columns = jnp.arange(room)[None]
    # Past the end, where writing does nothing: a row that waits keeps what it has.
    written = jnp.where(live, positions, room)
    rows = jnp.arange(tokens.shape[0])
    keys, values = list(cache.keys), list(cache.values)

    def write(buffer: Array, new: Array, column: int) -> Array:
        there = (rows, *[slice(None)] * (column - 1), written)
        return buffer.at[there].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def core_attention_of_layer(index, window=None):
        visible = columns <= positions[:, None]
        if window is not None:
            visible &= columns > positions[:, None] - window

        def core_attention(query, key, value, scale=None):
            keys[index] = write(keys[index], key, KEY_COLUMN)
            values[index] = write(values[index], value, VALUE_COLUMN)
            return cached_attention(query, keys[index], values[index], visible, scale)

        def of_narrow(query, narrow, up):
            vectors = keys[index] = write(keys[index], narrow[:, None], KEY_COLUMN)
            read = jnp.swapaxes(vectors[:, :, : up.shape[0]], 2, 3)
            query, scale = absorbed(query, up, config), config.head_dim**-0.5
            return released(cached_attention(query, vectors, read, visible, scale), up, config)

        return LatentCore(of_narrow) if keeps_narrow(config) else core_attention

    packed = PackedBatch(
        tokens=tokens,
        positions=positions,
        multiplicity=live.astype(jnp.float32),
        core_attention_of_layer=core_attention_of_layer,
        sequence_fractions=lambda counts: counts,  # nothing is learned here
        zigzag=ZigzagLayout(((tokens.shape[0], 1),), ranks=1),
        record_choices=record_choices,
    )
    # No loop over stacked layers: each one's cache is a buffer of its own, written in place.
    x, choices = embed(weights, tokens, config, mesh), []
    for index, layer in enumerate(layers):
        core_attention = core_attention_of_layer(index, window_of_layer(config, index))
        x, router = block(layer, x, packed, core_attention, config, mesh)
        if router is not None and router.choices is not None:
            choices.append(router.choices)
    x = rms_norm(x, weights.norm, config.norm_epsilon)
    chosen = join_shards(jnp.stack(choices, axis=1), mesh.sequence) if record_choices else None
    return logits_of(weights, x, config, mesh), Cache(tuple(keys), tuple(values)), chosen


def _dropless(config: ModelConfig) -> ModelConfig:
    """Which tokens are dropped depends on what else is in the batch; generation drops none, and
    nobody could run a step again in which buffers were too small."""
    return replace(config.for_any_routing(), capacity_factor=None)
