"""Attention sinks as extra keys, for kernels whose softmax has no sink term.

A sink is a key that every query sees, with a zero value. Its score is the head's sink for any
query: queries get two more elements, ``sink / scale`` and the rounding error of it, which multiply
ones in this key and zeros in all others. A sliding window would leave a key at the front of a row
behind. So with a window there is one sink before every `window` tokens: any ``window + 1``
neighbours, and any fewer from the first on, are exactly one sink and the tokens that the window
lets a query see.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

SINK_ELEMENTS = 2
"""Elements that sinks add to a head."""


def sinks_among(source: int, window: int | None) -> int:
    """Number of sinks among `source` tokens with a window; None is no window, and one sink."""
    return 1 if window is None else -(-source // window)


def with_sinks(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    sinks: Float[Array, "heads"],
    scale: float,
    num_sinks: int,
) -> tuple[
    Float[Array, "batch more_queries heads wider"],
    Float[Array, "batch more kv_heads wider"],
    Float[Array, "batch more kv_heads v_head_dim"],
]:
    """Queries, keys and values with `num_sinks` sinks in front; the queries there are zeros."""
    scores = sinks.astype(jnp.float32) / scale
    kind = jnp.finfo(query.dtype)
    # Not two casts: the compiler may remove a cast to a narrow dtype and back.
    rounded = lax.reduce_precision(scores, kind.nexp, kind.nmant)
    # The gradient goes through the first element alone: both are parts of one number.
    rest = lax.stop_gradient(scores - rounded)
    both = jnp.broadcast_to(jnp.stack([scores, rest], -1), (*query.shape[:3], SINK_ELEMENTS))
    query = jnp.concatenate([query, both.astype(query.dtype)], axis=-1)
    in_front = (0, 0), (num_sinks, 0), (0, 0), (0, 0)
    key = (
        jnp.pad(key, (*in_front[:3], (0, SINK_ELEMENTS)))
        .at[:, :num_sinks, :, -SINK_ELEMENTS:]
        .set(1)
    )
    return jnp.pad(query, in_front), key, jnp.pad(value, in_front)


def between_sinks(
    order: Int[Array, "batch source"], window: int | None
) -> Int[Array, "batch more"]:
    """Order of tokens and sinks together, from an order of the tokens alone.

    It indexes arrays in which the sinks come before all tokens (`with_sinks`).
    """
    source = order.shape[1]
    num_sinks = sinks_among(source, window)
    stride = 1 + (source if window is None else window)
    index = jnp.arange(source + num_sinks)
    sink = index // stride
    token = num_sinks + order[:, jnp.maximum(index - sink - 1, 0)]
    return jnp.where(index % stride == 0, sink, token)
