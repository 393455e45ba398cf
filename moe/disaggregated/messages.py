"""Message format between attention and expert devices: tokens, expert slots and gate weights in one
buffer.

All values are sent as their bits, in unsigned integers as wide as an element of the tokens, so that
one buffer holds tokens, ids and gate weights and nothing is rounded.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

WORD_DTYPES = {2: jnp.uint16, 4: jnp.uint32}
"""Unsigned dtypes by the item size of the tokens."""


def message_width(d_model: int, k: int, dtype: Any) -> int:
    """Number of words of a row that is sent: ``d_model + 2 k 4 / itemsize``, of `itemsize` bytes
    each."""
    return d_model + 2 * k * (4 // jnp.dtype(dtype).itemsize)


def encode_message(
    rows: Float[Array, "row d_model"], slots: Int[Array, "row k"], probs: Float[Array, "row k"]
) -> Shaped[Array, "row width"]:
    """Encodes tokens, the slots of their experts and their gate weights (float32) as rows of
    words."""
    word = WORD_DTYPES[rows.dtype.itemsize]
    fields = rows, slots.astype(jnp.int32), probs.astype(jnp.float32)
    return jnp.concatenate([_to_words(field, word) for field in fields], axis=1)


def decode_message(
    message: Shaped[Array, "row width"], d_model: int, k: int, dtype: Any
) -> tuple[Float[Array, "row d_model"], Int[Array, "row k"], Float[Array, "row k"]]:
    """Decodes a message of `encode_message`: tokens, slots and gate weights."""
    routing_words = (message.shape[1] - d_model) // 2
    return (
        lax.bitcast_convert_type(message[:, :d_model], dtype),
        _from_words(message[:, d_model : d_model + routing_words], k, jnp.int32),
        _from_words(message[:, d_model + routing_words :], k, jnp.float32),
    )


def _to_words(x: Array, word: Any) -> Array:
    return lax.bitcast_convert_type(x, word).reshape(x.shape[0], -1)


def _from_words(words: Array, k: int, dtype: Any) -> Array:
    if words.shape[1] != k:
        words = words.reshape(words.shape[0], k, -1)
    return lax.bitcast_convert_type(words, dtype)
