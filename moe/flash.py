"""How one device reads values: the plain twin, or a fused kernel that keeps no scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe.attention import read_values

IMPLEMENTATIONS = ("plain", "xla", "cudnn")


def read(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads value_dim"],
    visible: Bool[Array, "batch time source"],
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """``softmax(scale q k) v`` over the visible positions, by the implementation of that name.

    "plain" is `read_values`. "xla" and "cudnn" are those of `jax.nn.dot_product_attention`; the
    second is FlashAttention on an NVIDIA GPU: scores and their gradients stay on the chip, and what
    it reads from memory beside queries, keys and values is `visible`, one number for all heads.
    What a query reads that sees nothing differs between them; it is finite and used by nobody.

    Args:
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      implementation: None is "cudnn" where it applies, else "plain".

    Raises:
      ValueError: on an unknown name, and where "cudnn" is demanded and cannot serve.

    References:
      Dao, "FlashAttention-2", 2023. https://arxiv.org/abs/2307.08691
    """
    if implementation is None:
        implementation = "plain" if _why_not_cudnn(query, key, value) else "cudnn"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"execution.attention={implementation!r} is not known: "
            f"choose among {', '.join(IMPLEMENTATIONS)}, or None for the best that applies."
        )
    if implementation == "plain":
        return read_values(query, key, value, visible, scale)
    reason = _why_not_cudnn(query, key, value) if implementation == "cudnn" else None
    if reason is not None:
        raise ValueError(f'execution.attention="cudnn" cannot serve here: {reason}.')
    return jax.nn.dot_product_attention(
        query, key, value, mask=visible[:, None], scale=scale, implementation=implementation
    )


def _why_not_cudnn(query: Array, key: Array, value: Array) -> str | None:
    """What keeps cuDNN's kernel from these arrays and how to change it; None if nothing does."""
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if jax.default_backend() != "gpu":
        return f'it runs on NVIDIA GPUs, not on {jax.default_backend()!r}: choose "plain"'
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f'it takes bfloat16 and float16, not {query.dtype}: choose dtype="bfloat16"'
    if head_dim % 8 or head_dim > 128 or value_dim != head_dim:
        return (
            f"head_dim={head_dim} and value head_dim={value_dim} must be equal, at most 128 and a "
            'multiple of 8: choose such a size, or "plain"'
        )
    if query.shape[1] % 2 or key.shape[1] % 2:
        return (
            f"{query.shape[1]} queries and {key.shape[1]} keys must both be even: pad the rows, or "
            'choose "plain"'
        )
    return None
