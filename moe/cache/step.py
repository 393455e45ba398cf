"""Core attention of a step: one token per row, over the cache."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from moe.attention.cached import cached_attention
from moe.attention.latent import LatentCore, absorbed, keeps_narrow, released
from moe.attention.layer import CoreAttention
from moe.attention.mask import window_of_layer
from moe.cache.buffers import KEY_COLUMN, ROW, VALUE_COLUMN
from moe.cache.kernel import check_kernel
from moe.config import ModelConfig
from moe.kernels.decode_attention import decode_attention
from moe.kernels.latent_decode import latent_decode_attention
from moe.layers.implementations import chosen


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
        self._config, self._name = config, chosen(config, "decode_attention")
        check_kernel(config)
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
        self,
        query: Array,
        key: Array,
        value: Array,
        scale: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        assert self.values is not None
        self.keys = self._write(self.keys, key, KEY_COLUMN)
        self.values = self._write(self.values, value, VALUE_COLUMN)
        if self._name in (None, "plain"):
            keys, values = (self._own(x, c) for x, c in self._buffers())
            return cached_attention(query, keys, values, self._visible, scale, sinks)
        keys, values = (self._own_rows(x, c) for x, c in self._buffers())
        return decode_attention(
            query, keys, values, *self._ends, scale, layer=self._layer, implementation=self._name
        )

    def _of_narrow(self, query: Array, narrow: Array, up: Array) -> Array:
        config, rank = self._config, up.shape[0]
        self.keys = self._write(self.keys, narrow[:, None], KEY_COLUMN)
        query, scale = absorbed(query, up, config), config.head_dim**-0.5
        if self._name in (None, "plain"):
            vectors = self._own(self.keys, KEY_COLUMN)
            values = jnp.swapaxes(vectors[:, :, :rank], 2, 3)
            read = cached_attention(query, vectors, values, self._visible, scale)
        else:
            vectors, named = self._own_rows(self.keys, KEY_COLUMN), self._name
            given = query, vectors, *self._ends, scale
            read = latent_decode_attention(
                *given, rank=rank, layer=self._layer, implementation=named
            )
        return released(read, up, config)

    @property
    def _layer(self) -> Array | None:
        return self._place[0] if self._place else None

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
