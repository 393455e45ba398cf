"""The short causal convolution before the gated delta rule: one filter per channel, then SiLU."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Channels = Float[Array, "row time key_heads channel"]
Tail = Float[Array, "row key_heads channel before"]
Filters = Float[Array, "key_heads channel width"]


def short_convolution(
    x: Channels, filters: Filters, tail: Tail, reach: Int[Array, "row time"]
) -> Channels:
    """Causal convolution ``silu(sum_i w_{width - 1 - i} x_{t - i})`` over time, float32.

    Args:
      tail: the ``width - 1`` inputs before the first token, in order.
      reach: number of earlier tokens that a token may read, `tail` included: those of its own
        sequence. Others count as 0.
    """
    time, width = x.shape[1], filters.shape[-1]
    extended = prepend_tail(x, tail)
    terms = []
    for back in range(width):
        first = width - 1 - back
        earlier = extended[:, first : first + time]
        reached = (back <= reach)[:, :, None, None]
        terms.append(jnp.where(reached, earlier, 0.0) * filters[None, None, :, :, first])
    return jax.nn.silu(sum(terms[1:], terms[0]))


def tail_after(x: Channels, tail: Tail, lengths: Int[Array, "row"]) -> Tail:
    """Convolution state (the last ``width - 1`` inputs) after `lengths` tokens of each row."""
    indices = lengths[:, None] + jnp.arange(tail.shape[-1])[None]
    last = jax.vmap(lambda row, index: row[index])(prepend_tail(x, tail), indices)
    return jnp.moveaxis(last, 1, -1)


def prepend_tail(x: Channels, tail: Tail) -> Float[Array, "row extended key_heads channel"]:
    """Concatenates the tail and the tokens along time."""
    return jnp.concatenate([jnp.moveaxis(tail, -1, 1), x], axis=1)
