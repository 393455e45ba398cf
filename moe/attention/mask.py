"""Attention mask: a query sees earlier or equal columns of its own segment, inside a window.

A mask is a few numbers per token. An array of queries times keys is made only for a block, after
the ranges of these numbers show that some of the block may be visible.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from moe.config import ModelConfig

MAX_INDEX = 2**30
"""Larger than any column, position or segment id."""

Window = int | Int[Array, ""] | None
"""How many positions a query may look back, itself included; None is no limit."""


class TokenIndices(NamedTuple):
    """Column, position and segment id of tokens, from which masks are computed; arrays
    ``[*batch, time]``.

    Attributes:
      column: index in the row.
      position: position in the token's own sequence.
      segment: id of the sequence within the row; 0 for padding, which no query attends to.
    """

    column: Array
    position: Array
    segment: Array


@struct.dataclass
class Mask:
    """The mask of rows of queries and keys.

    Attributes:
      query: ``[batch, time]`` each.
      key: ``[batch, source]`` each.
      window: see `Window`; a number that is known only at run time is an array.
      causal: promises that the queries are the last positions of the keys, in their order, and that
        both are in the order of columns: most of the hidden scores can be skipped.
      single: promises that a row has no segments but 1 and padding.
    """

    query: TokenIndices
    key: TokenIndices
    window: Any = None  # a leaf: transformations put other things than arrays here
    causal: bool = struct.field(pytree_node=False, default=False)
    single: bool = struct.field(pytree_node=False, default=False)


def visible(
    query: TokenIndices, key: TokenIndices, window: Window = None
) -> Bool[Array, "*batch time source"]:
    """Boolean mask of the keys that each query may attend to."""
    q = TokenIndices(*(x[..., :, None] for x in query))
    k = TokenIndices(*(x[..., None, :] for x in key))
    # Columns, not positions: padding and earlier segments of the row keep their columns.
    seen = (q.column >= k.column) & (q.segment == k.segment) & (k.segment > 0)
    # Positions, not columns: padding between two tokens of a sequence is no distance.
    return seen if window is None else seen & (q.position - k.position < window)


def may_be_visible(
    query: TokenIndices, key: TokenIndices, window: Window = None
) -> Bool[Array, ""]:
    """True unless the ranges of the indices show that no key is visible to any query: False is
    certain, True is not."""
    last = jnp.max(_mask_padding(query, query.column, -1), axis=-1)
    first = jnp.min(_mask_padding(key, key.column, MAX_INDEX), axis=-1)
    possible = last >= first
    (low, high), (key_low, key_high) = (_segment_range(indices) for indices in (query, key))
    possible &= jnp.maximum(low, key_low) <= jnp.minimum(high, key_high)
    if window is not None:
        first = jnp.min(_mask_padding(query, query.position, MAX_INDEX), axis=-1)
        last = jnp.max(_mask_padding(key, key.position, -1), axis=-1)
        possible &= first - last < window
    return jnp.any(possible)


def is_fully_visible(
    query: TokenIndices, key: TokenIndices, window: Window = None
) -> Bool[Array, ""]:
    """True if the ranges of the indices show that every key is visible to every query: True is
    certain, False is not."""
    certain = jnp.min(query.column, axis=-1) >= jnp.max(key.column, axis=-1)
    segments = query.segment, key.segment
    low, key_low = (jnp.min(x, axis=-1) for x in segments)
    high, key_high = (jnp.max(x, axis=-1) for x in segments)
    certain &= (low > 0) & (low == high) & (low == key_low) & (low == key_high)
    if window is not None:
        certain &= jnp.max(query.position, axis=-1) - jnp.min(key.position, axis=-1) < window
    return jnp.all(certain)


def window_of_layer(config: ModelConfig, layer_index: int | Int[Array, ""]) -> Window:
    """Sliding window of a layer, whose index a pipeline stage knows only at run time."""
    window, full = config.sliding_window, config.full_attention_layers
    if window is None or not full:
        return window
    if isinstance(layer_index, int):
        return None if layer_index in full else window
    window_per_layer = [
        MAX_INDEX if layer in full else window for layer in range(config.num_layers)
    ]
    return jnp.asarray(window_per_layer, jnp.int32)[layer_index]


def _mask_padding(indices: TokenIndices, x: Array, fill: int) -> Array:
    return jnp.where(indices.segment > 0, x, fill)


def _segment_range(indices: TokenIndices) -> tuple[Array, Array]:
    low = jnp.min(_mask_padding(indices, indices.segment, MAX_INDEX), axis=-1)
    return low, jnp.max(indices.segment, axis=-1)
