"""The key/value cache and the one-token step.

A row's token at position p has its keys and values in column p, whatever the other rows do: rows
stand at different positions, and what a row computes does not depend on when it came. The cache is
one buffer per layer, key and value, or one for all layers of a stack that is scanned
(`moe.layers.depth`), written in place: a loop that carries it never copies it.
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
from moe.attention.layer import CoreAttention
from moe.attention.mask import Window, window_of_layer
from moe.config import ModelConfig
from moe.embedding import embed
from moe.head import logits_of
from moe.kernels.decode_attention import decode_attention
from moe.layers.depth import is_stack
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
    """Keys and values of the tokens so far, a buffer for each of `moe.layers.depth.parts_of`.

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
    config = for_prefill(config)
    packed = packed_prefill(tokens, lengths, config, mesh, record_choices)
    keep = partial(kept_columns, tokens.shape)
    x, router, kept = run_keeping(keep, weights, packed, config, mesh)
    keys, *values = zip(*kept, strict=True)
    chosen = None
    if record_choices:
        assert router is not None
        chosen = router.choices
        assert chosen is not None
    states, choices = by_row(x, chosen, packed, lengths, mesh)
    return Prefilled(Cache(keys, values[0] if values else ()), states, choices)


def for_prefill(config: ModelConfig) -> ModelConfig:
    """The network as rows of tokens run that are gone on with: no backward pass follows."""
    execution = replace(
        config.execution, remat="none", fsdp=False, buffer_factor=None, two_batch_overlap=False
    )
    return replace(_dropless(config), execution=execution)


def packed_prefill(
    tokens: Int[Array, "row column"],
    lengths: Int[Array, "row"],
    config: ModelConfig,
    mesh: FoldedMesh,
    record_choices: bool,
) -> PackedBatch:
    """The rows of `prefill` as its layers take them."""
    valid = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    packed = pack_rows(tokens, valid, mesh, config)
    return packed._replace(record_choices=record_choices)


def kept_columns(shape: tuple[int, ...], *arrays: Array) -> tuple[Array, ...]:
    """Keys and values of the tokens of rows, or narrow vectors, as a cache holds them.

    Args:
      shape: rows and columns of the tokens.
    """
    return tuple(
        jnp.moveaxis(x.reshape(*shape, *x.shape[1:]), 1, column)
        for x, column in zip(arrays, (KEY_COLUMN, VALUE_COLUMN), strict=False)
    )


def by_row(
    x: Float[Array, "local d_model"],
    chosen: Int[Array, "layer local k"] | None,
    packed: PackedBatch,
    lengths: Int[Array, "row"],
    mesh: FoldedMesh,
) -> tuple[Array, Array | None]:
    """States and choices as in `Prefilled`, of the last hidden states and choices of all tokens."""
    (of_rows,) = packed.zigzag.restore(join_shards(x, mesh.sequence))
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    states, choices = jnp.take_along_axis(of_rows, last, axis=1)[:, 0], None
    if chosen is not None:
        by_token = join_shards(jnp.moveaxis(chosen, 0, 1), mesh.sequence)
        (choices,) = packed.zigzag.restore(by_token)
    return states, choices


class StepCore:
    """Core attention of one token per row, which is written into the layer's cache first.

    Args:
      number: of the layer.
      keys, values: buffers of the cache that the layer's lie in; None for values with narrow
        vectors.
      positions: of the tokens, for rows of the buffers from `first` on.
      live: rows that are going; of the others nothing is written.
      place: which layer of a buffer that has layers in front.
      first: the row of the buffers that the first token belongs to.
      columns: that are read, None for all; every live row must stand within them.

    Attributes:
      keys, values: the buffers after `attend` has run.

    Raises:
      ValueError: where `Execution.decode_attention` names what cannot serve.
    """

    def __init__(
        self,
        config: ModelConfig,
        number: int | Array,
        keys: Array,
        values: Array | None,
        positions: Int[Array, "row"],
        live: Bool[Array, "row"],
        place: tuple[Array, ...] = (),
        first: Array | None = None,
        columns: int | None = None,
    ):
        self._config, self._name = config, config.execution.decode_attention
        if keeps_narrow(config) and self._name not in (None, "plain"):
            raise ValueError(
                f"decode_attention={self._name!r} reads keys and values, and latent attention "
                'keeps none: use None, or latent="expanded".'
            )
        self.keys, self.values = keys, values
        self._place, self._first, self._live = place, first, live
        room = keys.shape[KEY_COLUMN]
        self._columns = room if columns is None else columns
        # Past the end, where writing does nothing: a row that waits keeps what it has.
        self._written = jnp.where(live, positions, room)
        self._rows = jnp.arange(positions.shape[0]) + (0 if first is None else first)
        seen = jnp.arange(self._columns)[None]
        visible, window = seen <= positions[:, None], window_of_layer(config, number)
        oldest = jnp.zeros_like(positions)
        if window is not None:
            visible &= seen > positions[:, None] - window
            oldest = jnp.maximum(positions + 1 - window, 0)
        self._visible = visible
        # Of a row that is not live one column is enough.
        self._ends = jnp.where(live, oldest, 0), jnp.where(live, positions + 1, 1)

    @property
    def attend(self) -> CoreAttention | LatentCore:
        """What a block takes."""
        return LatentCore(self._of_narrow) if keeps_narrow(self._config) else self._of_heads

    def _of_heads(
        self, query: Array, key: Array, value: Array, scale: float | None = None
    ) -> Array:
        assert self.values is not None
        self.keys = self._write(self.keys, key, KEY_COLUMN)
        self.values = self._write(self.values, value, VALUE_COLUMN)
        if self._name in (None, "plain"):
            keys, values = (self._own(x, c) for x, c in self._buffers())
            return cached_attention(query, keys, values, self._visible, scale)
        keys, values = (self._own_rows(x, c) for x, c in self._buffers())
        layer = self._place[0] if self._place else None
        return decode_attention(
            query, keys, values, *self._ends, scale, layer=layer, implementation=self._name
        )

    def _of_narrow(self, query: Array, narrow: Array, up: Array) -> Array:
        config = self._config
        self.keys = self._write(self.keys, narrow[:, None], KEY_COLUMN)
        vectors = self._own(self.keys, KEY_COLUMN)
        read = jnp.swapaxes(vectors[:, :, : up.shape[0]], 2, 3)
        query, scale = absorbed(query, up, config), config.head_dim**-0.5
        return released(cached_attention(query, vectors, read, self._visible, scale), up, config)

    def _buffers(self) -> list[tuple[Array, int]]:
        assert self.values is not None
        return [(self.keys, KEY_COLUMN), (self.values, VALUE_COLUMN)]

    def _write(self, buffer: Array, new: Array, column: int) -> Array:
        there = (*self._place, self._rows, *[slice(None)] * (column - ROW - 1), self._written)
        return buffer.at[there].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def _own(self, buffer: Array, column: int) -> Array:
        """Of the layer, what is read of its rows."""
        if self._place:
            buffer = lax.dynamic_index_in_dim(buffer, *self._place, keepdims=False)
        return self._own_rows(buffer, column)

    def _own_rows(self, buffer: Array, column: int) -> Array:
        if self._first is not None:
            number = self._rows.shape[0]
            buffer = lax.dynamic_slice_in_dim(buffer, self._first, number, axis=buffer.ndim + ROW)
        if self._columns < buffer.shape[column]:
            buffer = lax.slice_in_dim(buffer, 0, self._columns, axis=buffer.ndim + column)
        return buffer


def for_step(config: ModelConfig) -> ModelConfig:
    """The network as a step of decoding runs it: its few tokens go to the experts at once."""
    execution = replace(config.execution, expert_chunks=1)
    return _dropless(replace(config, execution=execution))


def packed_step(
    tokens: Int[Array, "row"],
    positions: Int[Array, "row"],
    live: Bool[Array, "row"],
    core: CoreAttention | LatentCore | None = None,
    record_choices: bool = False,
) -> PackedBatch:
    """One token of each row as a layer takes them; nothing is learned of them."""

    def of_layer(index: int | Array, window: Window = None) -> CoreAttention | LatentCore:
        assert core is not None
        return core

    return PackedBatch(
        tokens=tokens,
        positions=positions,
        multiplicity=live.astype(jnp.float32),
        core_attention_of_layer=of_layer,
        sequences=None,
        zigzag=ZigzagLayout(((tokens.shape[0], 1),), ranks=1),
        record_choices=record_choices,
    )


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
      layers: the layers of `weights` in the parts of `moe.layers.depth.parts_of`, taken apart once
        outside the loop.
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
    config, narrow_cache = for_step(config), keeps_narrow(config)
    packed = packed_step(tokens, positions, live, record_choices=record_choices)

    def run_layer(
        number: int | Array,
        place: tuple[Array, ...],
        layer: Layer[Array],
        carry: tuple[Array, Array, Array | None],
    ) -> tuple[tuple[Array, Array, Array | None], Array | None]:
        """A layer of the network, and where its keys and values lie in their buffers."""
        x, keys, values = carry
        core = StepCore(config, number, keys, values, positions, live, place)
        x, router = block(layer, x, packed, core.attend, config, mesh)
        return (x, core.keys, core.values), None if router is None else router.choices

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
