"""KV cache: its buffers (and recurrent states), updated in place, and the core attention of a step
of decoding over it, one token per row, or some tokens of one row."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from moe.attention.delta import DeltaState
from moe.attention.latent import LatentCore, absorb_keys, caches_latent, project_values
from moe.attention.layer import CoreAttention, window_of_layer
from moe.config import Model
from moe.implementations import check_decode_kernel, selected_implementation
from moe.kernels import decode_attention as decode_kernel
from moe.kernels import latent_decode
from moe.kernels.decode_attention import UNIT, decode_attention
from moe.kernels.latent_decode import latent_decode_attention
from moe.ops.attention import cached_attention

Leaf = TypeVar("Leaf")

ROW, KEY_COLUMN, VALUE_COLUMN = -4, -1, -2
"""Axis of rows in a buffer, and of columns in keys and in values, counted from the end, as layers
may be in front."""


@struct.dataclass
class Cache(Generic[Leaf]):
    """KV cache: keys and values of the tokens so far, a buffer for each of
    `moe.layers.depth.split_layer_groups`; for layers with Gated DeltaNet the arrays of
    `moe.attention.delta.DeltaState` instead.

    Attributes:
      keys: per layer ``[row, kv_head, head_dim, column]``, with rotary positions; values: ``[row,
        kv_head, column, v_head_dim]``. The products of a decode step read them in this order: with
        another one each step would copy the buffers, or read them with strides. Latent attention
        has no values: its keys are the latent vectors shared by all heads, on each rank of ``tp``,
        unless `Execution.latent` is "expanded". A scanned stack has its layers in front, ``[layer,
        row, ...]``.
      states: per layer with Gated DeltaNet ``[row, value_heads, key_dim, value_dim]``; tails:
        ``[row, key_heads, channel, width - 1]``. They have no columns: they are the state after a
        row's last token.
    """

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]
    states: tuple[Leaf, ...] = ()
    tails: tuple[Leaf, ...] = ()


def reads_live_columns(model: Model) -> bool:
    """True if decode attention is a kernel: it reads the columns that a row sees, however long the
    cache is."""
    return selected_implementation(model, "decode_attention") not in (None, "plain")


def cache_columns(length: int, model: Model) -> int:
    """Number of columns of a cache for at least `length` of them: a multiple of ``tp``, over which
    the tokens of a prefill are sharded, and of the unit of the decode kernel, if there is one."""
    unit = math.lcm(model.mesh.size(model.mesh.tp), UNIT if reads_live_columns(model) else 1)
    return -(-length // unit) * unit


def kernel_bytes(model: Model, rows: int, num_positions: int) -> int:
    """Bytes on one device of the decode kernel's partial results before they are merged; 0 if no
    kernel runs. They are the results of one layer, as layers run one after the other.

    Args:
      rows: rows that a device decodes at a time.
      num_positions: positions of the cache that are read.
    """
    config = model.config
    if not reads_live_columns(model):
        return 0
    heads, kv_heads = (
        n // model.mesh.size(model.mesh.tp) for n in (config.num_heads, config.num_kv_heads)
    )
    if config.mla is not None and caches_latent(config):
        rank = config.mla.kv_lora_rank
        partial_results = latent_decode.output_shapes(rows, heads, rank, num_positions)
    else:
        partial_results = decode_kernel.output_shapes(
            rows, heads, kv_heads, config.v_head_dim, num_positions, config.dtype
        )
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in partial_results)


def over_columns(function: Callable[..., Leaf], *caches: Cache[Leaf]) -> Cache[Leaf]:
    """Maps a function of (buffers, column axis) over one cache or over corresponding buffers of
    more; the axis is None for a buffer without columns."""
    columns = {"keys": KEY_COLUMN, "values": VALUE_COLUMN, "states": None, "tails": None}

    def map_buffers(name: str, column: int | None) -> tuple[Leaf, ...]:
        buffers = zip(*(getattr(cache, name) for cache in caches), strict=True)
        return tuple(function(*corresponding, column) for corresponding in buffers)

    return Cache(**{name: map_buffers(name, column) for name, column in columns.items()})


def cache_of(group_buffers: Sequence[tuple[Leaf, ...]]) -> Cache[Leaf]:
    """Builds a cache from the buffers of each layer group: keys and, unless they are latent
    vectors, values; or a `DeltaState`."""
    heads = [buffers for buffers in group_buffers if not isinstance(buffers, DeltaState)]
    deltas = [buffers for buffers in group_buffers if isinstance(buffers, DeltaState)]
    keys, *values = zip(*heads, strict=True)
    states, tails = zip(*deltas, strict=True) if deltas else ((), ())
    return Cache(keys, values[0] if values else (), states, tails)


def to_cache_layout(shape: tuple[int, ...], *arrays: Array) -> tuple[Array, ...]:
    """Reshapes keys and values of tokens of this shape, rows and columns, or latent vectors, to the
    layout of a cache."""
    return tuple(
        jnp.moveaxis(x.reshape(*shape, *x.shape[1:]), 1, column)
        for x, column in zip(arrays, (KEY_COLUMN, VALUE_COLUMN), strict=False)
    )


def index_layer(buffer: Array, stack_index: tuple[Array, ...]) -> Array:
    """Slice of a layer's buffer; an empty index means a layer by itself."""
    return lax.dynamic_index_in_dim(buffer, *stack_index, keepdims=False) if stack_index else buffer


class StepTokens(NamedTuple):
    """Tokens of a decode step, one of each row; or tokens of one row, in their order.

    Attributes:
      tokens: ``[row]`` ids.
      positions: ``[row]`` position of each in its row, from 0.
      live: ``[row]`` true for rows that are being decoded; results of the others are undefined.
      row: ``[]`` row of the cache that all tokens belong to; None if each has its own.
    """

    tokens: Int[Array, "row"]
    positions: Int[Array, "row"]
    live: Bool[Array, "row"]
    row: Int[Array, ""] | None = None


class StepCore:
    """Core attention of the tokens of a step, which are written into the layer's cache first.

    Args:
      buffers: keys and values of the layer, or of the stack that it is in, in the layout of
        `moe.cache.Cache`; latent vectors alone if it has those (MLA).
      inputs: the tokens; nothing is written for rows that are not live.
      stack_index: index of the layer in a buffer with layers in front.
      first: row of the buffers that the first token belongs to, if each has its own.
      num_positions: number of positions that are read, None for all; every live row must be within
        them.

    Attributes:
      buffers: after `attend` has run.

    Raises:
      ValueError: if `Execution.decode_attention` names a kernel that does not support the network.
    """

    def __init__(
        self,
        model: Model,
        layer_index: int | Array,
        buffers: tuple[Array, ...],
        inputs: StepTokens,
        stack_index: tuple[Array, ...] = (),
        first: Array | None = None,
        num_positions: int | None = None,
    ):
        config = model.config
        self._config = config
        # The kernels have a query of each row.
        is_one_row = inputs.row is not None
        self._name = None if is_one_row else selected_implementation(model, "decode_attention")
        check_decode_kernel(config)
        positions, live = inputs.positions, inputs.live
        num_tokens = positions.shape[0]
        self.buffers: tuple[Array, ...] = buffers
        self._stack_index, self._first = stack_index, inputs.row if is_one_row else first
        self._num_rows = 1 if is_one_row else num_tokens
        capacity = buffers[0].shape[KEY_COLUMN]
        self._num_positions = capacity if num_positions is None else num_positions
        # Past the end a write has no effect: rows that are not live stay unchanged.
        tokens = jnp.arange(num_tokens)
        self._write_columns = jnp.where(live, positions, capacity + (tokens if is_one_row else 0))
        first_row = 0 if self._first is None else self._first
        self._rows = jnp.full(num_tokens, first_row) if is_one_row else first_row + tokens
        seen = jnp.arange(self._num_positions)[None]
        visible, window = seen <= positions[:, None], window_of_layer(config, layer_index)
        oldest = jnp.zeros_like(positions)
        if window is not None:
            visible &= seen > positions[:, None] - window
            oldest = jnp.maximum(positions + 1 - window, 0)
        self._visible = visible
        # One column is enough for a row that is not live: the kernel needs at least one.
        self._ends = jnp.where(live, oldest, 0), jnp.where(live, positions + 1, 1)

    @property
    def attend(self) -> CoreAttention | LatentCore:
        """Core attention to pass to a block."""
        is_latent = caches_latent(self._config)
        return LatentCore(self._attend_latent) if is_latent else self._attend_heads

    def _attend_heads(
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        keys, values = self.buffers
        keys = self._write(keys, key, KEY_COLUMN)
        values = self._write(values, value, VALUE_COLUMN)
        self.buffers = keys, values
        is_plain = self._name in (None, "plain")
        read = self._slice_layer if is_plain else self._slice_rows
        keys, values = read(keys, KEY_COLUMN), read(values, VALUE_COLUMN)
        if is_plain:
            return cached_attention(query, keys, values, self._visible, scale, sinks)
        return decode_attention(
            query, keys, values, *self._ends, scale, layer=self._layer, implementation=self._name
        )

    def _attend_latent(self, query: Array, narrow: Array, up: Array) -> Array:
        config, rank = self._config, up.shape[0]
        vectors = self._write(self.buffers[0], narrow[:, None], KEY_COLUMN)
        self.buffers = (vectors,)
        query, scale = absorb_keys(query, up, config), config.head_dim**-0.5
        if self._name in (None, "plain"):
            vectors = self._slice_layer(vectors, KEY_COLUMN)
            values = jnp.swapaxes(vectors[:, :, :rank], 2, 3)
            read = cached_attention(query, vectors, values, self._visible, scale)
        else:
            vectors = self._slice_rows(vectors, KEY_COLUMN)
            how: dict[str, Any] = {"layer": self._layer, "implementation": self._name}
            read = latent_decode_attention(query, vectors, *self._ends, scale, rank=rank, **how)
        return project_values(read, up, config)

    @property
    def _layer(self) -> Array | None:
        return self._stack_index[0] if self._stack_index else None

    def _write(self, buffer: Array, new: Array, column: int) -> Array:
        between = [slice(None)] * (column - ROW - 1)
        index = (*self._stack_index, self._rows, *between, self._write_columns)
        return buffer.at[index].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def _slice_layer(self, buffer: Array, column: int) -> Array:
        """Slice of a buffer that is read: the layer, its rows and columns."""
        return self._slice_rows(index_layer(buffer, self._stack_index), column)

    def _slice_rows(self, buffer: Array, column: int) -> Array:
        if self._first is not None:
            axis = buffer.ndim + ROW
            buffer = lax.dynamic_slice_in_dim(buffer, self._first, self._num_rows, axis=axis)
        if self._num_positions < buffer.shape[column]:
            buffer = lax.slice_in_dim(buffer, 0, self._num_positions, axis=buffer.ndim + column)
        return buffer
