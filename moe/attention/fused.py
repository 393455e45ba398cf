"""Attention by the fused kernels of `jax.nn.dot_product_attention` (cuDNN, XLA). Row lengths are
the mask, and sinks are keys.

The tokens of a row with one sequence are moved to the front, in order: then a causal kernel needs
only the row's length, and no array of queries times keys exists. Rows of multiple sequences need a
mask array, one number for all heads: cuDNN also takes such rows by the offsets of their sequences,
but the public function does not pass these on, and JAX's private one reads the keys of other tokens
before 0.12 where query heads share a key/value head.

The kernels' softmax has no sink term. A sink is therefore a key that every query sees, with a zero
value. Its score is the head's sink for any query: queries get two more elements, ``sink / scale``
and the rounding error of it, which multiply ones in this key and zeros in all others. A sliding
window would leave a key at the front of a row behind. So with a window there is one sink before
every `window` tokens: any ``window + 1`` neighbours, and any fewer from the first on, are exactly
one sink and the tokens that the window lets a query see.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from moe.ops.mask import Mask, visible
from sharding.collectives import match_varying

Kernel = Literal["xla", "cudnn"]
MAX_MASK_ELEMENTS = 2**27
"""Elements of a mask, at most: 256 MiB of half precision, and as much again for the gradient of the
mask that the kernel computes."""

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
    key = jnp.pad(key, (*in_front[:3], (0, SINK_ELEMENTS)))
    key = key.at[:, :num_sinks, :, -SINK_ELEMENTS:].set(1)
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


def fused_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None,
    implementation: Kernel,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions, by the named kernel.

    With row lengths as the mask queries are computed for all positions of the keys, with zeros
    before the first one; if these would be the majority and a mask array is small enough, it is
    used instead.
    """
    size, width = head_size(query, value, sinks), value.shape[-1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value, sinks = match_varying((query, key, value, sinks), mask)
    by_lengths, num_sinks = takes_lengths(mask), 0
    if sinks is not None:
        num_sinks = sinks_among(key.shape[1], mask.window if by_lengths else None)
        query, key, value = with_sinks(query, key, value, sinks, factor, num_sinks)
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[-1]))) for x in (query, key, value)
    )
    kernel = partial(jax.nn.dot_product_attention, scale=factor, implementation=implementation)
    attend = _attend_by_lengths if by_lengths else _attend_by_mask
    out = attend(kernel, query, key, value, mask, num_sinks)
    return out[:, num_sinks:, :, :width]


def cudnn_obstacle(
    query: Array, value: Array, mask: Mask, sinks: Array | None = None
) -> str | None:
    """The reason why cuDNN's kernel does not support these arrays, and the remedy; None if it
    does."""
    if jax.default_backend() != "gpu":
        return f'it runs on NVIDIA GPUs, not on {jax.default_backend()!r}: choose "plain"'
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f'it takes bfloat16 and float16, not {query.dtype}: choose dtype="bfloat16"'
    size = head_size(query, value, sinks)
    widest = 256 if float(jax.devices()[0].compute_capability) >= 9 else 128
    if size > widest:
        return f'heads of {size} are wider than {widest}: choose narrower ones, or "plain"'
    if not takes_lengths(mask) and mask_size(mask) > MAX_MASK_ELEMENTS:
        return (
            f"the mask has {mask_size(mask)} elements, more than {MAX_MASK_ELEMENTS} (packed "
            'sequences, partial rows and windows that vary by layer need one): choose "blocked"'
        )
    return None


def takes_lengths(mask: Mask) -> bool:
    """True if row lengths can replace the mask array."""
    time, source = mask.query.column.shape[1], mask.key.column.shape[1]
    static = mask.window is None or isinstance(mask.window, int)
    few = 2 * time < source and mask_size(mask) <= MAX_MASK_ELEMENTS
    return mask.causal and mask.single and static and not few


def mask_size(mask: Mask) -> int:
    """Number of elements of a mask of queries times keys."""
    return mask.query.column.size * mask.key.column.shape[1]


def head_size(query: Array, value: Array, sinks: Array | None = None) -> int:
    """Head size for the kernels, which take one size for queries, keys and values, a multiple of 8;
    the zeros that pad them change no score."""
    wide = query.shape[-1] + (0 if sinks is None else SINK_ELEMENTS)
    return -(-max(wide, value.shape[-1]) // 8) * 8


def _attend_by_mask(
    kernel: Callable[..., Array], query: Array, key: Array, value: Array, mask: Mask, sinks: int
) -> Array:
    time, source = query.shape[1], key.shape[1]
    seen = visible(mask.query, mask.key, mask.window)
    seen = jnp.pad(seen, ((0, 0), (sinks, 0), (sinks, 0))).at[:, :, :sinks].set(True)
    out = kernel(
        *(_pad_to_even(x, 1) for x in (query, key, value)),
        mask=_pad_to_even(_pad_to_even(seen, 1), 2)[:, None],
        is_causal=mask.causal and time == source,
    )
    return out[:, :time]


def _attend_by_lengths(
    kernel: Callable[..., Array], query: Array, key: Array, value: Array, mask: Mask, sinks: int
) -> Array:
    time, source = query.shape[1], key.shape[1]
    tokens, window = mask.key.segment > 0, mask.window
    # Tokens first, padding after them, both in the order of columns.
    order = jnp.argsort(~tokens, axis=1, stable=True)
    lengths = jnp.sum(tokens, axis=1, dtype=jnp.int32)
    # Number of positions that a query sees: its own, and those before it.
    reach = window
    if sinks:
        order = between_sinks(order, window)
        lengths += jnp.minimum(lengths, 1) if window is None else -(-lengths // window)
        reach = None if window is None else window + 1
    back = jnp.argsort(order, axis=1)
    within = (jnp.arange(source)[None] < lengths[:, None])[..., None, None]
    query = jnp.pad(query, ((0, 0), (source - time, 0), (0, 0), (0, 0)))
    # Zeros after them: whatever a kernel writes there, forward or backward, is not read.
    packed = (jnp.where(within, _permute(x, order, back), 0) for x in (query, key, value))
    out = kernel(
        *(_pad_to_even(x, 1) for x in packed),
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if reach is None else (reach - 1, 0),
    )
    return _permute(jnp.where(within, out[:, :source], 0), back, order)[:, source - time :]


@jax.custom_vjp
def _permute(
    x: Shaped[Array, "batch time *rest"],
    order: Int[Array, "batch time"],
    back: Int[Array, "batch time"],
) -> Shaped[Array, "batch time *rest"]:
    """Gathers the tokens of rows in another order. The gradient is gathered in the order `back`,
    by another gather and no scatter-add."""
    rest = (1,) * (x.ndim - 2)
    return jnp.take_along_axis(x, order.reshape(*order.shape, *rest), axis=1)


def _permute_forward(x, order, back):
    return _permute(x, order, back), (order, back)


def _permute_backward(orders, gradient):
    return _permute(gradient, *reversed(orders)), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _pad_to_even(x: Array, axis: int) -> Array:
    """`x` padded to an even length: the gradient's kernel does not take an odd one."""
    return jnp.pad(x, [(0, x.shape[axis] % 2 if n == axis else 0) for n in range(x.ndim)])
