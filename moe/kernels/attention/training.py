"""The kernels of attention as a pair, forward and backward, and what they serve."""

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.attention.flash import Flash, flash_attention
from moe.attention.mask import Mask
from moe.kernels.attention.forward import attend
from moe.kernels.attention.gradient import attend_gradient
from moe.kernels.choice import foreign_gpus
from moe.kernels.decode_attention import unequal, unserved

FLASH = Flash(attend, attend_gradient)
"""What some of the keys give, in float32, for those who add up more."""


def mosaic_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """`moe.attention.flash.flash_attention` by kernels for Hopper, which read no block of keys that
    the ranges of its marks tell to be hidden.

    Scores, softmax and sums are float32; its powers are rounded to the dtype of the values and the
    scores' gradients to that of the queries, as the results are.

    Args:
      query, key, value: without an `obstacle`.
    """
    # Sinks take their part of what is not rounded yet.
    flash = _rounding(jnp.dtype(value.dtype if sinks is None else jnp.float32), value.dtype)
    return flash_attention(flash, query, key, value, mask, scale, sinks)


@cache
def _rounding(out: Any, gradients: Any) -> Flash:
    """The pair that writes such dtypes: as float32, all would be read once more to be rounded."""
    return Flash(partial(attend, dtype=out), partial(attend_gradient, dtype=gradients))


def obstacle(query: Array, key: Array, value: Array) -> str | None:
    """What keeps the kernels from such arrays and this process's GPUs; None if nothing does."""
    reason = unequal("query, key and value", query, key, value)
    reason = reason or unserved(query.dtype, 1, query.shape[-1], value.shape[-1])
    return reason or foreign_gpus(hopper_alone=True)
