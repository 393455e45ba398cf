"""Compressed communication: FP8 for activations, bfloat16 for gradients, float32 sums for both.

**Activations** travel in one byte per element with float32 scales. In the forward pass each token
has a scale; in the backward pass each channel of up to `GROUP_TOKENS` consecutive tokens has one. A
number x of a group whose largest is a is received within ``max(2^-4 |x|, 2^-10 a / 448)``, and a
float32 rounding; a group with a number that is not finite is received as NaN. Values are sent as
bytes (uint8), which every device supports. On devices without FP8 arithmetic the numbers are equal.

**Gradients** travel in bfloat16, half the bytes of a float32 reduce-scatter.

Sums are sent as terms, by an all-to-all, and added up in float32 by the receiver. Each term is
rounded once. A ring that reduces in a low precision rounds the running sum at each of its ``n - 1``
steps, so that its error grows with the number of devices.

References:
  Jin et al., "MegaScale-MoE", 2025, on communication compression (E4M3; per token forward, per
  channel backward in groups of 128 tokens; gradients accumulated in float32, cast once; all-to-all
  and a float32 sum in place of reduce-scatter). https://arxiv.org/abs/2505.11432
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from sharding.collectives import COLLECTIVE, Axes, IndexGroups, all_to_all, vary, with_transpose

ACTIVATION_DTYPES = ("float8_e4m3fn",)
"""Communication dtypes of activations, besides their own."""
GROUP_TOKENS = 128
"""Tokens that share a scale of each channel in the backward pass."""
E4M3_MAX = 448.0
"""Largest number of E4M3."""
Encoded = tuple[Array, Array]
"""Bytes, and the scales that they are multiplied by."""


def e4m3_scale(largest: Array) -> Array:
    """Scale that maps a largest magnitude to E4M3's largest, 448; above 0 even if all values are
    0."""
    # Bounded from below so that neither it nor a quotient by it leaves float32's normal range.
    return jnp.maximum(largest / E4M3_MAX, jnp.finfo(jnp.float32).tiny)


def encode(x: Array, scale: Array) -> Array:
    """``x / scale`` in E4M3, as bytes."""
    quotient = (x.astype(jnp.float32) / scale).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(quotient, jnp.uint8)


def decode(sent: Array, scale: Array) -> Array:
    """Dequantizes the result of `encode`, float32."""
    return lax.bitcast_convert_type(sent, jnp.float8_e4m3fn).astype(jnp.float32) * scale


def encode_tokens(x: Float[Array, "*block token width"]) -> Encoded:
    """Quantizes with a scale per token: bytes and ``[*block, token, 1]`` scales."""
    scale = e4m3_scale(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True))
    return encode(x, scale), scale


def encode_channels(x: Float[Array, "*block token width"]) -> Encoded:
    """Quantizes with a scale per channel and group: bytes and ``[*block, group, width]`` scales."""
    groups = -(-x.shape[-2] // GROUP_TOKENS)
    padding = [(0, 0)] * x.ndim
    padding[-2] = (0, groups * GROUP_TOKENS - x.shape[-2])
    padded = jnp.pad(jnp.abs(x.astype(jnp.float32)), padding)
    split = padded.reshape(*x.shape[:-2], groups, GROUP_TOKENS, x.shape[-1])
    scale = e4m3_scale(jnp.max(split, axis=-2))
    return encode(x, _repeat_scale(scale, x.shape[-2])), scale


def decode_tokens(encoded: Encoded) -> Array:
    """Dequantizes the result of `encode_tokens`, float32."""
    return decode(*encoded)


def decode_channels(encoded: Encoded) -> Array:
    """Dequantizes the result of `encode_channels`, float32."""
    sent, scale = encoded
    return decode(sent, _repeat_scale(scale, sent.shape[-2]))


def _repeat_scale(scale: Array, num_tokens: int) -> Array:
    return jnp.repeat(scale, GROUP_TOKENS, axis=-2)[..., :num_tokens, :]


def _all_to_all(
    encoded: Encoded, axes: Axes, name: str = COLLECTIVE, groups: IndexGroups | None = None
) -> Encoded:
    sent, scale = (all_to_all(x, axes, name, groups) for x in encoded)
    return sent, scale


def _all_gather(encoded: Encoded, axes: Axes, name: str = COLLECTIVE) -> Encoded:
    """All-gathers the blocks of all devices, in a new leading dimension."""
    sent, scale = (checkpoint_name(lax.all_gather(x, axes), name) for x in encoded)
    return sent, scale


def _sum_terms(terms: Float[Array, "device token width"]) -> Float[Array, "token width"]:
    """Sums the terms in the order of the devices."""
    first = terms[0]
    return lax.fori_loop(1, terms.shape[0], lambda i, total: total + terms[i], first, unroll=8)


def _split_by_device(x: Array, axes: Axes) -> Array:
    return x.reshape(lax.axis_size(axes), -1, x.shape[-1])


def exchange_fp8(
    x: Float[Array, "peer slot width"],
    axes: Axes,
    name: str = COLLECTIVE,
    groups: IndexGroups | None = None,
) -> Float[Array, "peer slot width"]:
    """`sharding.collectives.all_to_all` of blocks of tokens.

    Volume sent: (n-1)/n of the elements, and of a float32 number for each token; backward, for each
    group and channel.
    """
    if x.shape[0] == 1:
        return x
    dtype = x.dtype

    def exchange(x: Array) -> Array:
        return decode_tokens(_all_to_all(encode_tokens(x), axes, name, groups)).astype(dtype)

    def exchange_back(gradient: Array) -> Array:
        sent = _all_to_all(encode_channels(gradient), axes, groups=groups)
        return decode_channels(sent).astype(dtype)

    return with_transpose(exchange, exchange_back)(vary(x, axes))


def gather_fp8(
    x: Float[Array, "local width"], axes: Axes, dtype: Any = None, name: str = COLLECTIVE
) -> Float[Array, "all width"]:
    """`sharding.collectives.gather_tokens` in FP8, returned in `dtype` (None: the dtype of `x`).

    Its gradient is sent as terms that are summed in float32. Volume received: (n-1) shards of a
    byte an element and a float32 number a token; backward as many bytes, and a float32 number for
    each group and channel.
    """
    input_dtype, width = x.dtype, x.shape[-1]
    dtype = input_dtype if dtype is None else dtype
    if lax.axis_size(axes) == 1:
        return x.astype(dtype)

    def gather(x: Array) -> Array:
        blocks = decode_tokens(_all_gather(encode_tokens(x), axes, name))
        return blocks.reshape(-1, width).astype(dtype)

    def scatter(gradient: Array) -> Array:
        terms = _all_to_all(encode_channels(_split_by_device(gradient, axes)), axes)
        return _sum_terms(decode_channels(terms)).astype(input_dtype)

    return with_transpose(gather, scatter)(vary(x, axes))


def scatter_fp8(
    x: Float[Array, "all width"], axes: Axes, dtype: Any = None
) -> Float[Array, "local width"]:
    """`sharding.collectives.scatter_tokens` in FP8, summed in float32 and rounded to `dtype`.

    None is the dtype of `x`. It is the reverse of `gather_fp8`, with the same volume.
    """
    input_dtype, width = x.dtype, x.shape[-1]
    dtype = input_dtype if dtype is None else dtype
    if lax.axis_size(axes) == 1:
        return x.astype(dtype)

    def scatter(x: Array) -> Array:
        terms = _all_to_all(encode_tokens(_split_by_device(x, axes)), axes)
        return _sum_terms(decode_tokens(terms)).astype(dtype)

    def gather(gradient: Array) -> Array:
        blocks = decode_channels(_all_gather(encode_channels(gradient), axes))
        return blocks.reshape(-1, width).astype(input_dtype)

    return with_transpose(scatter, gather)(vary(x, axes))


def compressed_reduce_scatter(
    x: Float[Array, "*full"], axes: Axes, dim: int
) -> Float[Array, "*shard"]:
    """Reduce-scatter over `axes` of terms rounded to bfloat16 and summed in float32.

    Each device keeps its shard of the dimension `dim` of ``sum_i bf16(x_i)``, added up in the order
    of the devices, so that the same terms give the same bits. It equals `jax.lax.psum_scatter` for
    terms that bfloat16 represents exactly. Of others each element is off by at most
    ``2^-8 sum_i |x_i|``, on up to 2^8 devices the rounding of the float32 sums included, and for
    numbers in float32's normal range. A term beyond bfloat16's largest number becomes infinite.

    Volume sent, of an array of G elements: ``G (n-1)/n`` of two bytes.

    Args:
      x: array of this device, float32; `dim` divides by the devices.
    """
    n = lax.axis_size(axes)
    terms = x.astype(jnp.bfloat16).reshape(*x.shape[:dim], n, -1, *x.shape[dim + 1 :])
    terms = lax.all_to_all(terms, axes, split_axis=dim, concat_axis=dim, tiled=True)

    def term(i):
        return lax.dynamic_index_in_dim(terms, i, dim, keepdims=False).astype(jnp.float32)

    # The compiler may reorder a sum over the dimension; a loop has a defined order. Unrolled,
    # additions share a pass over memory; a full unroll would be a long program on many devices.
    return lax.fori_loop(1, n, lambda i, total: total + term(i), term(0), unroll=8)
