"""The key/value cache and the one-token step.

A row's token at position p has its keys and values in column p, whatever the other rows do: rows
stand at different positions, and what a row computes does not depend on when it came. The cache is
one buffer per layer, key and value, or one for all layers of a stack that is scanned (`moe.depth`),
written in place: a loop that carries it never copies it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moe.attention.cached import cached_attention
from moe.attention.latent import LatentCore, absorbed, keeps_narrow, released
from moe.attention.mask import window_of_layer
from moe.config import ModelConfig
from moe.depth import is_stack
from moe.embedding import embed
from moe.head import logits_of
from moe.kernels.decode_attention import decode_attention
from moe.model import block, run_keeping
from moe.precision import rms_norm
from moe.tokens.packing import PackedBatch, pack_rows
from moe.tokens.zigzag import ZigzagLayout
from moe.weights import Layer, Transformer
from sharding.collectives import join_shards
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


@struct.dataclass
class Cache(Generic[Leaf]):
    """Keys and values of the tokens so far, a buffer for each of `moe.depth.parts_of`.

    Attributes:
      keys: per layer ``[row, kv_head, head_dim, column]``, rotated; values: ``[row, kv_head,
        column, v_head_dim]``. So the products of a decoding step want them: in another order each
        step would copy the buffers, or read them piece by piece. Latent attention has no values:
        its keys are the narrow vectors of all heads together, on each rank of ``tp``, unless
        `Execution.latent` is "expanded". A stack that is scanned has its layers in front, ``[layer,
        row, ...]``.
    """

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]


ROW, KEY_COLUMN, VALUE_COLUMN = -4, -1, -2
"""Which axis of a buffer the rows are, and which of keys and of values the columns: from the end,
for layers may lie in front."""


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
    # No backward pass follows.
    execution = replace(config.execution, remat="none", fsdp=False, buffer_factor=None)
    config = replace(_dropless(config), execution=execution)
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    packed = pack_rows(tokens, valid, mesh, config.execution)
    packed = packed._replace(record_choices=record_choices)

    def keep(*arrays: Array) -> tuple[Array, ...]:
        return tuple(
            jnp.moveaxis(x.reshape(*valid.shape, *x.shape[1:]), 1, column)
            for x, column in zip(arrays, (KEY_COLUMN, VALUE_COLUMN), strict=False)
        )

    x, router, kept = run_keeping(keep, weights, packed, config, mesh)
    keys, *values = zip(*kept, strict=True)
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
      layers: the layers of `weights` in the parts of `moe.depth.parts_of`, taken apart once outside
        the loop.
      cache: of live rows written at `positions`, in place when the caller gives it up; other rows
        stay as they are.
      tokens: the tokens to append.
      positions: where in its row each token stands, from 0; less than the cache's columns.
      live: rows that are going; what is computed for the others is rubbish.
      record_choices: whether to give the experts that each token chose.

    Raises:
      ValueError: where `Execution.decode_attention` names what cannot serve.

    Returns:
      Logits of this ``tp`` rank's shard of the rows, the cache, and the choices, `num_experts`
      where a row is not live; None where they were not asked for.
    """
    config = _dropless(config)
    room = cache.keys[0].shape[KEY_COLUMN]
    columns = jnp.arange(room)[None]
    # Past the end, where writing does nothing: a row that waits keeps what it has.
    written = jnp.where(live, positions, room)
    rows, narrow_cache = jnp.arange(tokens.shape[0]), keeps_narrow(config)
    name = config.execution.decode_attention
    if narrow_cache and name not in (None, "plain"):
        raise ValueError(
            f"decode_attention={name!r} reads keys and values, and latent attention keeps none: "
            'use None, or latent="expanded".'
        )

    def write(buffer: Array, new: Array, column: int, layer: tuple[Array, ...]) -> Array:
        there = (*layer, rows, *[slice(None)] * (column - ROW - 1), written)
        return buffer.at[there].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    packed_with = partial(
        PackedBatch,
        tokens=tokens,
        positions=positions,
        multiplicity=live.astype(jnp.float32),
        sequences=None,  # nothing is learned here
        zigzag=ZigzagLayout(((tokens.shape[0], 1),), ranks=1),
        record_choices=record_choices,
    )

    def run_layer(
        number: int | Array,
        place: tuple[Array, ...],
        layer: Layer[Array],
        carry: tuple[Array, Array, Array | None],
    ) -> tuple[tuple[Array, Array, Array | None], Array | None]:
        """A layer of the network, and where its keys and values lie in their buffers."""
        x, keys, values = carry
        visible, window = columns <= positions[:, None], window_of_layer(config, number)
        oldest = jnp.zeros_like(positions)
        if window is not None:
            visible &= columns > positions[:, None] - window
            oldest = jnp.maximum(positions + 1 - window, 0)

        def own(buffer: Array) -> Array:
            return lax.dynamic_index_in_dim(buffer, *place, keepdims=False) if place else buffer

        def core_attention(
            query: Array, key: Array, value: Array, scale: float | None = None
        ) -> Array:
            nonlocal keys, values
            assert values is not None
            keys = write(keys, key, KEY_COLUMN, place)
            values = write(values, value, VALUE_COLUMN, place)
            if name in (None, "plain"):
                return cached_attention(query, own(keys), own(values), visible, scale)
            # Of a row that is not live one column is enough.
            ends = jnp.where(live, oldest, 0), jnp.where(live, positions + 1, 1)
            layer = place[0] if place else None
            return decode_attention(
                query, keys, values, *ends, scale, layer=layer, implementation=name
            )

        def of_narrow(query: Array, narrow: Array, up: Array) -> Array:
            nonlocal keys
            keys = write(keys, narrow[:, None], KEY_COLUMN, place)
            vectors = own(keys)
            read = jnp.swapaxes(vectors[:, :, : up.shape[0]], 2, 3)
            query, scale = absorbed(query, up, config), config.head_dim**-0.5
            return released(cached_attention(query, vectors, read, visible, scale), up, config)

        attend = LatentCore(of_narrow) if narrow_cache else core_attention
        packed = packed_with(core_attention_of_layer=lambda number, window=None: attend)
        x, router = block(layer, x, packed, attend, config, mesh)
        return (x, keys, values), None if router is None else router.choices

    x, choices, after, first = embed(weights, tokens, config, mesh), [], [], 0
    values_of_parts = [None] * len(layers) if narrow_cache else cache.values
    for layer, keys, values in zip(layers, cache.keys, values_of_parts, strict=True):
        carry, depth = (x, keys, values), 1
        if is_stack(layer):
            depth = layer.norm.shape[0]
            # The buffers are carried, and a layer writes its part of them: as what a scan takes
            # layer by layer and gives back, all that they hold would be copied.
            carry, chosen = lax.scan(
                lambda carry, given, first=first: run_layer(
                    first + given[0], (given[0],), given[1], carry
                ),
                carry,
                (jnp.arange(depth), layer),
            )
        else:
            carry, chosen = run_layer(first, (), layer, carry)
            chosen = None if chosen is None else chosen[None]
        first += depth
        x, *buffers = carry
        after.append(buffers)
        if chosen is not None:
            choices.append(chosen)
    x = rms_norm(x, weights.norm, config.norm_epsilon)
    chosen = None
    if record_choices:
        chosen = join_shards(jnp.moveaxis(jnp.concatenate(choices), 0, 1), mesh.sequence)
    keys, values = zip(*after, strict=True)
    after_step = Cache(keys, () if narrow_cache else values)
    return logits_of(weights, x, config, mesh), after_step, chosen


def _dropless(config: ModelConfig) -> ModelConfig:
    """Which tokens are dropped depends on what else is in the batch; generation drops none, and
    nobody could run a step again in which buffers were too small."""
    return replace(config.for_any_routing(), capacity_factor=None)
