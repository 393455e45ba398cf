"""The cache: what rows of tokens are gone on with, written in place."""

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from moe.attention.delta.sequences import DeltaState
from moe.config import ModelConfig
from moe.kernels.decode_attention import UNIT
from moe.layers.implementations import chosen
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


@struct.dataclass
class Cache(Generic[Leaf]):
    """Keys and values of the tokens so far, a buffer for each of `moe.layers.depth.parts_of`; of
    those with Gated DeltaNet what `moe.attention.delta.sequences.DeltaState` holds in their place.

    Attributes:
      keys: per layer ``[row, kv_head, head_dim, column]``, rotated; values: ``[row, kv_head,
        column, v_head_dim]``. So the products of a decoding step want them: in another order each
        step would copy the buffers, or read them piece by piece. Latent attention has no values:
        its keys are the narrow vectors of all heads together, on each rank of ``tp``, unless
        `Execution.latent` is "expanded". A stack that is scanned has its layers in front, ``[layer,
        row, ...]``.
      states: per layer with Gated DeltaNet ``[row, value_heads, key_dim, value_dim]``; tails:
        ``[row, key_heads, channel, width - 1]``. They have no columns: they are of a row's last
        token.
    """

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]
    states: tuple[Leaf, ...] = ()
    tails: tuple[Leaf, ...] = ()


ROW, KEY_COLUMN, VALUE_COLUMN = -4, -1, -2
"""Which axis of a buffer the rows are, and which of keys and of values the columns: from the end,
for layers may lie in front."""


def cache_columns(columns: int, config: ModelConfig, mesh: FoldedMesh) -> int:
    """How many columns a cache has that holds at least so many: tokens that run together are spread
    over ``tp``, and a kernel of a decoding step takes a multiple of its own."""
    named = chosen(config, "decode_attention") not in (None, "plain")
    unit = math.lcm(mesh.size(mesh.tp), UNIT if named else 1)
    return -(-columns // unit) * unit


def over_columns(function: Callable[..., Leaf], *caches: Cache[Leaf]) -> Cache[Leaf]:
    """`function` of each buffer, or of those in the same place of several caches, and of the axis
    that its columns are, None where it has none."""
    columns = {"keys": KEY_COLUMN, "values": VALUE_COLUMN, "states": None, "tails": None}

    def mapped(name: str, column: int | None) -> tuple[Leaf, ...]:
        buffers = zip(*(getattr(cache, name) for cache in caches), strict=True)
        return tuple(function(*own, column) for own in buffers)

    return Cache(**{name: mapped(name, column) for name, column in columns.items()})


def cache_of(kept: Sequence[tuple[Leaf, ...]]) -> Cache[Leaf]:
    """That of what layers keep: keys and, but with narrow vectors, values, or a `DeltaState`."""
    heads = [own for own in kept if not isinstance(own, DeltaState)]
    deltas = [own for own in kept if isinstance(own, DeltaState)]
    keys, *values = zip(*heads, strict=True)
    states, tails = zip(*deltas, strict=True) if deltas else ((), ())
    return Cache(keys, values[0] if values else (), states, tails)


def kept_columns(shape: tuple[int, ...], *arrays: Array) -> tuple[Array, ...]:
    """Keys and values of the tokens of rows, or narrow vectors, as a cache holds them.

    Args:
      shape: rows and columns of the tokens.
    """
    return tuple(
        jnp.moveaxis(x.reshape(*shape, *x.shape[1:]), 1, column)
        for x, column in zip(arrays, (KEY_COLUMN, VALUE_COLUMN), strict=False)
    )
