"""Core attention of a decode step: one token per row, over the KV cache."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from moe.attention.latent import LatentCore, absorb_keys, caches_latent, project_values
from moe.attention.layer import CoreAttention, window_of_layer
from moe.cache.buffers import KEY_COLUMN, ROW, VALUE_COLUMN
from moe.config import ModelConfig
from moe.implementations import check_decode_kernel, selected_implementation
from moe.kernels.decode_attention import decode_attention
from moe.kernels.latent_decode import latent_decode_attention
from moe.ops.attention import cached_attention
from sharding.folding import FoldedMesh


class StepTokens(NamedTuple):
    """Tokens of a decode step, one of each row.

    Attributes:
      tokens: ``[row]`` ids.
      positions: ``[row]`` position of each in its row, from 0.
      live: ``[row]`` true for rows that are being decoded; results of the others are undefined.
    """

    tokens: Int[Array, "row"]
    positions: Int[Array, "row"]
    live: Bool[Array, "row"]


class StepCore:
    """Core attention of one token per row, which is written into the layer's cache first.

    Args:
      layer_index: index of the layer in the network.
      buffers: keys and values of the layer, or of the stack that it is in, in the layout of
        `moe.cache.buffers.Cache`; latent vectors alone where it has those.
      inputs: the tokens; nothing is written for rows that are not live.
      stack_index: index of the layer in a buffer with layers in front.
      first: row of the buffers that the first token belongs to.
      num_positions: number of positions that are read, None for all; every live row must be within
        them.
      mesh: mesh of the program, for the choice of a kernel; None is this process's devices.

    Attributes:
      buffers: after `attend` has run.

    Raises:
      ValueError: if `Execution.decode_attention` names a kernel that does not support the network.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int | Array,
        buffers: tuple[Array, ...],
        inputs: StepTokens,
        stack_index: tuple[Array, ...] = (),
        first: Array | None = None,
        num_positions: int | None = None,
        mesh: FoldedMesh | None = None,
    ):
        self._config = config
        self._name = selected_implementation(config, "decode_attention", mesh)
        check_decode_kernel(config)
        positions, live = inputs.positions, inputs.live
        self.buffers: tuple[Array, ...] = buffers
        self._stack_index, self._first = stack_index, first
        capacity = buffers[0].shape[KEY_COLUMN]
        self._num_positions = capacity if num_positions is None else num_positions
        # Past the end, where a write has no effect: rows that are not live stay unchanged.
        self._write_columns = jnp.where(live, positions, capacity)
        self._rows = jnp.arange(positions.shape[0]) + (0 if first is None else first)
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
        return (
            LatentCore(self._attend_latent) if caches_latent(self._config) else self._attend_heads
        )

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
            vectors, named = self._slice_rows(vectors, KEY_COLUMN), self._name
            read = latent_decode_attention(
                query,
                vectors,
                *self._ends,
                scale,
                rank=rank,
                layer=self._layer,
                implementation=named,
            )
        return project_values(read, up, config)

    @property
    def _layer(self) -> Array | None:
        return self._stack_index[0] if self._stack_index else None

    def _write(self, buffer: Array, new: Array, column: int) -> Array:
        index = (
            *self._stack_index,
            self._rows,
            *[slice(None)] * (column - ROW - 1),
            self._write_columns,
        )
        return buffer.at[index].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def _slice_layer(self, buffer: Array, column: int) -> Array:
        """Slice of a buffer that is read: the layer, its rows and columns."""
        if self._stack_index:
            buffer = lax.dynamic_index_in_dim(buffer, *self._stack_index, keepdims=False)
        return self._slice_rows(buffer, column)

    def _slice_rows(self, buffer: Array, column: int) -> Array:
        if self._first is not None:
            num_rows = self._rows.shape[0]
            buffer = lax.dynamic_slice_in_dim(buffer, self._first, num_rows, axis=buffer.ndim + ROW)
        if self._num_positions < buffer.shape[column]:
            buffer = lax.slice_in_dim(buffer, 0, self._num_positions, axis=buffer.ndim + column)
        return buffer
