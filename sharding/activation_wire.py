"""FP8 communication of activations: one byte per element, and float32 scales.

In the forward pass each token has a scale of its own; in the backward pass each channel of up to
`GROUP` consecutive tokens has one. Sums are sent as terms, by an all-to-all, and added up in
float32 by the receiver, so that nothing is rounded twice. A number x of a group whose largest is a
is received within ``max(2^-4 |x|, 2^-10 a / 448)``, and a float32 rounding; a group with a number
that is not finite is received as NaN.

Values are sent as bytes (uint8), which every device supports. On devices without FP8 arithmetic
the numbers are the same.

References:
  Jin et al., "MegaScale-MoE", 2025, on communication compression (E4M3; reduce-scatter as an
  all-to-all and a float32 sum; per token forward, per channel backward in groups of 128 tokens).
  https://arxiv.org/abs/2505.11432
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from sharding.collectives import COLLECTIVE, Axes, vary

WIRES = ("float8_e4m3fn",)
"""Communication dtypes of activations, besides their own."""
GROUP = 128
"""Tokens that share a scale of each channel in the backward pass."""
LARGEST = 448.0
"""Largest number of E4M3."""
Parts = tuple[Array, Array]
"""Bytes, and the scales that they are multiplied by."""


def scale_of(largest: Array) -> Array:
    """Scale that maps a largest magnitude to that of E4M3; above 0 even if all values are 0."""
    # Bounded from below so that neither it nor a quotient by it leaves float32's normal range.
    return jnp.maximum(largest / LARGEST, jnp.finfo(jnp.float32).tiny)


def to_bytes(x: Array, scale: Array) -> Array:
    """``x / scale`` in E4M3, as bytes."""
    quotient = (x.astype(jnp.float32) / scale).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(quotient, jnp.uint8)


def from_bytes(sent: Array, scale: Array) -> Array:
    """Dequantizes the result of `to_bytes`, float32."""
    return lax.bitcast_convert_type(sent, jnp.float8_e4m3fn).astype(jnp.float32) * scale


def by_token(x: Float[Array, "*block token width"]) -> Parts:
    """Quantizes with a scale per token: bytes and ``[*block, token, 1]`` scales."""
    scale = scale_of(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True))
    return to_bytes(x, scale), scale


def by_channel(x: Float[Array, "*block token width"]) -> Parts:
    """Quantizes with a scale per channel and group: bytes and ``[*block, group, width]`` scales."""
    groups = -(-x.shape[-2] // GROUP)
    padding = [(0, 0)] * x.ndim
    padding[-2] = (0, groups * GROUP - x.shape[-2])
    whole = jnp.pad(jnp.abs(x.astype(jnp.float32)), padding)
    split = whole.reshape(*x.shape[:-2], groups, GROUP, x.shape[-1])
    scale = scale_of(jnp.max(split, axis=-2))
    return to_bytes(x, _of_tokens(scale, x.shape[-2])), scale


def of_tokens(parts: Parts) -> Array:
    """Dequantizes the result of `by_token`, float32."""
    return from_bytes(*parts)


def of_channels(parts: Parts) -> Array:
    """Dequantizes the result of `by_channel`, float32."""
    sent, scale = parts
    return from_bytes(sent, _of_tokens(scale, sent.shape[-2]))


def _of_tokens(scale: Array, number: int) -> Array:
    return jnp.repeat(scale, GROUP, axis=-2)[..., :number, :]


def _all_to_all(parts: Parts, axes: Axes, name: str = COLLECTIVE) -> Parts:
    sent, scale = (
        checkpoint_name(lax.all_to_all(part, axes, split_axis=0, concat_axis=0, tiled=True), name)
        for part in parts
    )
    return sent, scale


def _all_gather(parts: Parts, axes: Axes, name: str = COLLECTIVE) -> Parts:
    """All-gathers the blocks of all devices, in a new leading dimension."""
    sent, scale = (checkpoint_name(lax.all_gather(part, axes), name) for part in parts)
    return sent, scale


def _summed(terms: Float[Array, "device token width"]) -> Float[Array, "token width"]:
    """Sums the terms in the order of the devices."""
    first = terms[0]
    return lax.fori_loop(1, terms.shape[0], lambda i, total: total + terms[i], first, unroll=8)


def _blocks(x: Array, axes: Axes) -> Array:
    return x.reshape(lax.axis_size(axes), -1, x.shape[-1])


def exchange_fp8(
    x: Float[Array, "peer slot width"], axes: Axes, name: str = COLLECTIVE
) -> Float[Array, "peer slot width"]:
    """`sharding.collectives.all_to_all` of blocks of tokens.

    Volume sent: (n-1)/n of the elements, and of a float32 number for each token; backward, for each
    group and channel.
    """
    return x if lax.axis_size(axes) == 1 else _exchange(vary(x, axes), axes, x.dtype, name)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _exchange(x: Array, axes: Axes, dtype: Any, name: str) -> Array:
    return _exchange_forward(x, axes, dtype, name)[0]


def _exchange_forward(x: Array, axes: Axes, dtype: Any, name: str) -> tuple[Array, None]:
    return of_tokens(_all_to_all(by_token(x), axes, name)).astype(dtype), None


def _exchange_backward(axes: Axes, dtype: Any, name: str, _: None, gradient: Array):
    return (of_channels(_all_to_all(by_channel(gradient), axes)).astype(dtype),)


_exchange.defvjp(_exchange_forward, _exchange_backward)


def gather_fp8(
    x: Float[Array, "local width"], axes: Axes, dtype: Any = None, name: str = COLLECTIVE
) -> Float[Array, "all width"]:
    """`sharding.collectives.gather_tokens` in FP8, returned in `dtype` (None: that of `x`).

    Its gradient is sent as terms that are summed in float32. Volume received: (n-1) shards of a
    byte an element and a float32 number a token; backward as many bytes, and a float32 number for
    each group and channel.
    """
    dtype = x.dtype if dtype is None else dtype
    if lax.axis_size(axes) == 1:
        return x.astype(dtype)
    return _gather(vary(x, axes), axes, x.dtype, dtype, name)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(x: Array, axes: Axes, given: Any, dtype: Any, name: str) -> Array:
    return _gather_forward(x, axes, given, dtype, name)[0]


def _gather_forward(x: Array, axes: Axes, given: Any, dtype: Any, name: str):
    blocks = of_tokens(_all_gather(by_token(x), axes, name))
    return blocks.reshape(-1, x.shape[-1]).astype(dtype), None


def _gather_backward(axes: Axes, given: Any, dtype: Any, name: str, _: None, gradient: Array):
    terms = of_channels(_all_to_all(by_channel(_blocks(gradient, axes)), axes))
    return (_summed(terms).astype(given),)


_gather.defvjp(_gather_forward, _gather_backward)


def scatter_fp8(
    x: Float[Array, "all width"], axes: Axes, dtype: Any = None
) -> Float[Array, "local width"]:
    """`sharding.collectives.scatter_tokens` in FP8, summed in float32 and rounded to `dtype`.

    None is the dtype of `x`. It is the reverse of `gather_fp8`, with the same volume.
    """
    dtype = x.dtype if dtype is None else dtype
    if lax.axis_size(axes) == 1:
        return x.astype(dtype)
    return _scatter(vary(x, axes), axes, x.dtype, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _scatter(x: Array, axes: Axes, given: Any, dtype: Any) -> Array:
    return _scatter_forward(x, axes, given, dtype)[0]


def _scatter_forward(x: Array, axes: Axes, given: Any, dtype: Any):
    terms = of_tokens(_all_to_all(by_token(_blocks(x, axes)), axes))
    return _summed(terms).astype(dtype), None


def _scatter_backward(axes: Axes, given: Any, dtype: Any, _: None, gradient: Array):
    blocks = of_channels(_all_gather(by_channel(gradient), axes))
    return (blocks.reshape(-1, gradient.shape[-1]).astype(given),)


_scatter.defvjp(_scatter_forward, _scatter_backward)
