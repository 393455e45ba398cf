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
from moe.config import ModelConfig
from moe.depth import is_stack
from moe.head import logits_of
from moe.model import block, check_window, embed, run_keeping
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
        step would copy the buffers, or read them piece by piece. Latent attention keeps what it
        expands. A stack that is scanned has its layers in front, ``[layer, row, ...]``.
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
    execution = replace(config.execution, remat="none", fsdp=False)
    config = replace(_dropless(config), execution=execution)
    check_window(tokens.shape[1], config)
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    packed = pack_rows(tokens, valid, mesh, config.execution)
    packed = packed._replace(record_choices=record_choices)

    def keep(key: Array, value: Array) -> tuple[Array, ...]:
        return tuple(
            jnp.moveaxis(x.reshape(*valid.shape, *x.shape[1:]), 1, column)
            for x, column in ((key, KEY_COLUMN), (value, VALUE_COLUMN))
        )

    x, router, kept = run_keeping(keep, weights, packed, config, mesh)
    keys, values = zip(*kept, strict=True)
    (by_row,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    states, choices = jnp.take_along_axis(by_row, last, axis=1)[:, 0], None
    if record_choices:
        assert router is not None
        assert router.choices is not None
        by_token = join_shards(jnp.moveaxis(router.choices, 0, 1), mesh.sequence)
        (choices,) = packed.zigzag.restore(by_token)
    return Prefilled(Cache(keys, values), states, choices)


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

    Returns:
      Logits of this ``tp`` rank's shard of the rows, the cache, and the choices, `num_experts`
      where a row is not live; None where they were not asked for.
    """
    config = _dropless(config)
    room = cache.keys[0].shape[KEY_COLUMN]
    check_window(room, config)
    columns = jnp.arange(room)
    visible = columns[None] <= positions[:, None]
    # Past the end, where writing does nothing: a row that waits keeps what it has.
    written = jnp.where(live, positions, room)
    rows = jnp.arange(tokens.shape[0])

    def write(buffer: Array, new: Array, column: int, layer: tuple[Array, ...]) -> Array:
        there = (*layer, rows, *[slice(None)] * (column - ROW - 1), written)
        return buffer.at[there].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    packed_with = partial(
        PackedBatch,
        tokens=tokens,
        positions=positions,
        multiplicity=live.astype(jnp.float32),
        sequence_fractions=lambda counts: counts,  # nothing is learned here
        zigzag=ZigzagLayout(((tokens.shape[0], 1),), ranks=1),
        record_choices=record_choices,
    )

    def run_layer(
        place: tuple[Array, ...], layer: Layer[Array], carry: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array, Array], Array | None]:
        """A layer, and where its keys and values lie in their buffers."""
        x, keys, values = carry

        def core_attention(
            query: Array, key: Array, value: Array, scale: float | None = None
        ) -> Array:
            nonlocal keys, values
            keys = write(keys, key, KEY_COLUMN, place)
            values = write(values, value, VALUE_COLUMN, place)
            own_keys, own_values = (
                lax.dynamic_index_in_dim(x, *place, keepdims=False) if place else x
                for x in (keys, values)
            )
            return cached_attention(query, own_keys, own_values, visible, scale)

        packed = packed_with(core_attention_of_layer=lambda number: core_attention)
        x, router = block(layer, x, packed, core_attention, config, mesh)
        return (x, keys, values), None if router is None else router.choices

    x, choices, after = embed(weights, tokens, config, mesh), [], []
    for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
        carry = x, keys, values
        if is_stack(layer):
            # The buffers are carried, and a layer writes its part of them: as what a scan takes
            # layer by layer and gives back, all that they hold would be copied.
            carry, chosen = lax.scan(
                lambda carry, given: run_layer((given[0],), given[1], carry),
                carry,
                (jnp.arange(layer.norm.shape[0]), layer),
            )
        else:
            carry, chosen = run_layer((), layer, carry)
            chosen = None if chosen is None else chosen[None]
        x, *buffers = carry
        after.append(buffers)
        if chosen is not None:
            choices.append(chosen)
    x = rms_norm(x, weights.norm, config.norm_epsilon)
    chosen = None
    if record_choices:
        chosen = join_shards(jnp.moveaxis(jnp.concatenate(choices), 0, 1), mesh.sequence)
    keys, values = zip(*after, strict=True)
    return logits_of(weights, x, config, mesh), Cache(keys, values), chosen


def _dropless(config: ModelConfig) -> ModelConfig:
    """Which tokens are dropped depends on what else is in the batch; generation drops none."""
    return replace(config, capacity_factor=None)
