"""Buffers of the KV cache (and of recurrent states), updated in place."""

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from moe.attention.delta import DeltaState
from moe.attention.latent import caches_latent
from moe.config import ModelConfig
from moe.implementations import selected_implementation
from moe.kernels import decode_attention, latent_decode
from moe.kernels.decode_attention import UNIT
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


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


ROW, KEY_COLUMN, VALUE_COLUMN = -4, -1, -2
"""Axis of rows in a buffer, and of columns in keys and in values, counted from the end, as layers
may be in front."""


def cache_columns(length: int, config: ModelConfig, mesh: FoldedMesh) -> int:
    """Number of columns of a cache for at least `length` of them: a multiple of ``tp``, over which
    the tokens of a prefill are sharded, and of the unit of the decode kernel, if there is one."""
    named = selected_implementation(config, "decode_attention", mesh) not in (None, "plain")
    unit = math.lcm(mesh.size(mesh.tp), UNIT if named else 1)
    return -(-length // unit) * unit


def kernel_bytes(config: ModelConfig, mesh: FoldedMesh, rows: int, num_positions: int) -> int:
    """Bytes on one device of the decode kernel's partial results before they are merged; 0 if no
    kernel runs. They are those of one layer, as layers run one after the other.

    Args:
      rows: rows that a device decodes at a time.
      num_positions: positions of the cache that are read.
    """
    if selected_implementation(config, "decode_attention", mesh) in (None, "plain"):
        return 0
    tp = mesh.size(mesh.tp)
    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    if config.mla is not None and caches_latent(config):
        partial_results = latent_decode.output_shapes(
            rows, heads, config.mla.kv_lora_rank, num_positions
        )
    else:
        partial_results = decode_attention.output_shapes(
            rows, heads, kv_heads, config.head_dim, config.v_head_dim, num_positions
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
    """Reshapes keys and values of the tokens of rows, or latent vectors, to the layout of a cache.

    Args:
      shape: rows and columns of the tokens.
    """
    return tuple(
        jnp.moveaxis(x.reshape(*shape, *x.shape[1:]), 1, column)
        for x, column in zip(arrays, (KEY_COLUMN, VALUE_COLUMN), strict=False)
    )
