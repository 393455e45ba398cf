"""FlashAttention kernels for training on Hopper, forward and backward, for packed rows with causal,
segment and sliding-window masks: differentiable attention, and the check of what they support."""

from functools import cache, partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.kernels.attention.forward import attend
from moe.kernels.attention.gradient import attend_gradient
from moe.kernels.choice import foreign_gpus, unsupported_dtypes
from moe.kernels.decode_attention import unsupported_heads
from moe.ops.attention import Flash, flash_attention
from moe.ops.mask import Mask

FLASH = Flash(attend, attend_gradient)
"""Attention over a subset of the keys, in float32, for callers that merge the results."""


def mosaic_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """`moe.ops.attention.flash_attention` by kernels for Hopper, which skip each block of keys
    that the ranges of its mask fields show to be hidden.

    Scores, softmax and sums are float32. Exponentials are rounded to the dtype of the values, score
    gradients to the dtype of the queries, as the results are.

    Args:
      query, key, value: arrays for which `obstacle` is None.
    """
    # Sinks rescale the output, so it must not be rounded before.
    flash = _rounding(jnp.dtype(value.dtype if sinks is None else jnp.float32), value.dtype)
    return flash_attention(flash, query, key, value, mask, scale, sinks)


@cache
def _rounding(out: Any, gradients: Any) -> Flash:
    """The kernels with these dtypes of results: float32 ones would be read once more to be rounded.

    Cached, as JAX compares static arguments: a new object would be traced again.
    """
    return Flash(partial(attend, dtype=out), partial(attend_gradient, dtype=gradients))


def obstacle(query: Array, key: Array, value: Array) -> str | None:
    """The reason why the kernels do not support these arrays or this process's GPUs; None if they
    do."""
    reason = unsupported_dtypes("query, key and value", query, key, value)
    reason = reason or unsupported_heads(query.dtype, 1, query.shape[-1], value.shape[-1])
    return reason or foreign_gpus(hopper_only=True)
