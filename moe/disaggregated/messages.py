"""One message for each pair of devices: tokens and where they are routed, side by side.

Numbers travel as the bits that they are, in unsigned integers as wide as those of the tokens, so
that one buffer holds tokens, ids and probs and nothing is rounded.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

WORDS = {2: jnp.uint16, 4: jnp.uint32}
"""By the bytes of a number of the tokens."""


def message_width(d_model: int, k: int, dtype: Any) -> int:
    """Words of a row that goes out: ``d_model + 2 k 4 / itemsize``, of `itemsize` bytes each."""
    return d_model + 2 * k * (4 // jnp.dtype(dtype).itemsize)


def written_message(
    rows: Float[Array, "row d_model"], slots: Int[Array, "row k"], probs: Float[Array, "row k"]
) -> Shaped[Array, "row width"]:
    """Tokens with the slots of their experts and the probs, float32, a row of words for each."""
    word = WORDS[rows.dtype.itemsize]
    parts = rows, slots.astype(jnp.int32), probs.astype(jnp.float32)
    return jnp.concatenate([_words(part, word) for part in parts], axis=1)


def read_message(
    message: Shaped[Array, "row width"], d_model: int, k: int, dtype: Any
) -> tuple[Float[Array, "row d_model"], Int[Array, "row k"], Float[Array, "row k"]]:
    """What `written_message` was given."""
    rest = (message.shape[1] - d_model) // 2
    return (
        lax.bitcast_convert_type(message[:, :d_model], dtype),
        _wide(message[:, d_model : d_model + rest], k, jnp.int32),
        _wide(message[:, d_model + rest :], k, jnp.float32),
    )


def _words(x: Array, word: Any) -> Array:
    return lax.bitcast_convert_type(x, word).reshape(x.shape[0], -1)


def _wide(words: Array, k: int, dtype: Any) -> Array:
    if words.shape[1] != k:
        words = words.reshape(words.shape[0], k, -1)
    return lax.bitcast_convert_type(words, dtype)
