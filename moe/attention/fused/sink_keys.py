"""Attention sinks as keys, for kernels whose softmax knows keys alone.

A sink is a key that every query sees, without a value: its score is the head's sink whatever the
query is, as queries get two more elements, ``sink / scale`` and what rounding takes off it, that
meet ones in this key and zeros in all others. A window passes over a key that stands in front of a
row: there one stands before every `window` tokens, so that any ``window + 1`` neighbours, and any
fewer from the first on, are one sink and the tokens that the window lets a query see.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

WIDTH = 2
"""Elements that sinks add to a head."""


def sinks_among(source: int, window: int | None) -> int:
    """How many stand among that many tokens, of which a window shows so many; None is all."""
    return 1 if window is None else -(-source // window)


def with_sinks(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    sinks: Float[Array, "heads"],
    scale: float,
    number: int,
) -> tuple[
    Float[Array, "batch more_queries heads wider"],
    Float[Array, "batch more kv_heads wider"],
    Float[Array, "batch more kv_heads v_head_dim"],
]:
    """All three with so many sinks in front, as queries zeros."""
    scores = sinks.astype(jnp.float32) / scale
    kind = jnp.finfo(query.dtype)
    # A cast there and back may be left out by the compiler.
    rounded = lax.reduce_precision(scores, kind.nexp, kind.nmant)
    # Gradients by the first alone: both are of one number.
    rest = lax.stop_gradient(scores - rounded)
    both = jnp.broadcast_to(jnp.stack([scores, rest], -1), (*query.shape[:3], WIDTH))
    query = jnp.concatenate([query, both.astype(query.dtype)], axis=-1)
    in_front = (0, 0), (number, 0), (0, 0), (0, 0)
    key = jnp.pad(key, (*in_front[:3], (0, WIDTH))).at[:, :number, :, -WIDTH:].set(1)
    return jnp.pad(query, in_front), key, jnp.pad(value, in_front)


def between_sinks(
    order: Int[Array, "batch source"], window: int | None
) -> Int[Array, "batch more"]:
    """An order of tokens, as one of tokens behind their sinks in which these are among them."""
    source = order.shape[1]
    number = sinks_among(source, window)
    stride = 1 + (source if window is None else window)
    place = jnp.arange(source + number)
    sink = place // stride
    token = number + order[:, jnp.maximum(place - sink - 1, 0)]
    return jnp.where(place % stride == 0, sink, token)
