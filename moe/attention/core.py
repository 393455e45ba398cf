"""Core attention on one device: the plain twin, or an implementation that keeps no scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe.attention.blocked import blocked_attention
from moe.attention.mask import Mask, visible
from moe.attention.plain import plain_attention

IMPLEMENTATIONS = ("plain", "blocked", "xla", "cudnn")
LARGEST_PLAIN = 2**21
"""Scores up to which a CPU is quicker with all of them at once: about what its caches hold."""
LARGEST_KEPT = 2**28
"""Scores up to which another device has all of them at once: 1 GiB of float32, in a layer."""


def core_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions, by the implementation of that name.

    "plain" is `plain_attention`; "blocked" is `moe.attention.blocked`, the same block by block with
    a gradient of its own. "xla" and "cudnn" are those of `jax.nn.dot_product_attention`; the second
    is FlashAttention on an NVIDIA GPU: scores and their gradients stay on the chip, and what it
    reads from memory beside queries, keys and values is the mask, one number for all heads.
    What a query gets that sees nothing differs between them; it is finite and used by nobody.

    Args:
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      implementation: None is "cudnn" where it applies; else "blocked" where there are more scores
        than `LARGEST_PLAIN` on a CPU or `LARGEST_KEPT` elsewhere; else "plain".

    Raises:
      ValueError: on an unknown name, and where "cudnn" is demanded and cannot serve.

    References:
      Dao, "FlashAttention-2", 2023. https://arxiv.org/abs/2307.08691
    """
    size = _head_size(query, value)
    if implementation is None:
        implementation = _best(query, key, size)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"execution.attention={implementation!r} is not known: "
            f"choose among {', '.join(IMPLEMENTATIONS)}, or None for the best that applies."
        )
    if implementation == "plain":
        return plain_attention(query, key, value, visible(mask.query, mask.key, mask.window), scale)
    if implementation == "blocked":
        return blocked_attention(query, key, value, mask, scale)
    reason = _why_not_cudnn(query.dtype, size) if implementation == "cudnn" else None
    if reason is not None:
        raise ValueError(f'execution.attention="cudnn" cannot serve here: {reason}.')
    out = jax.nn.dot_product_attention(
        *(_padded(x, size) for x in (query, key, value)),
        mask=_even(_even(visible(mask.query, mask.key, mask.window), 1), 2)[:, None],
        is_causal=mask.causal and query.shape[1] == key.shape[1],
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        implementation=implementation,
    )
    return out[:, : query.shape[1], :, : value.shape[-1]]


def _best(query: Array, key: Array, head_size: int) -> str:
    """The implementation for such arrays."""
    if _why_not_cudnn(query.dtype, head_size) is None:
        return "cudnn"
    batch, time, heads, _ = query.shape
    most = LARGEST_PLAIN if jax.default_backend() == "cpu" else LARGEST_KEPT
    return "blocked" if batch * heads * time * key.shape[1] > most else "plain"


def _head_size(query: Array, value: Array) -> int:
    """The kernels take heads of one size, a multiple of 8: the zeros added change no score."""
    return -(-max(query.shape[-1], value.shape[-1]) // 8) * 8


def _padded(x: Array, size: int) -> Array:
    return _even(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[-1]))), 1)


def _even(x: Array, axis: int) -> Array:
    """`x` with a zero after an odd number of places, which is what the gradient's kernel takes."""
    return jnp.pad(x, [(0, x.shape[axis] % 2 if n == axis else 0) for n in range(x.ndim)])


def _why_not_cudnn(dtype: jnp.dtype, head_size: int) -> str | None:
    """What keeps cuDNN's kernel from such arrays and how to change it; None if nothing does."""
    if jax.default_backend() != "gpu":
        return f'it runs on NVIDIA GPUs, not on {jax.default_backend()!r}: choose "plain"'
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f'it takes bfloat16 and float16, not {dtype}: choose dtype="bfloat16"'
    widest = 256 if float(jax.devices()[0].compute_capability) >= 9 else 128
    if head_size > widest:
        return f'heads of {head_size} are wider than {widest}: choose narrower ones, or "plain"'
    return None
