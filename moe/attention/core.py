"""Core attention on one device: the reference implementation, or a faster one that saves no
scores."""

from jaxtyping import Array, Float

from moe.attention.blocked import BLOCKED, BLOCKED_ON_GPU
from moe.attention.fused import cudnn_obstacle, fused_attention
from moe.kernels.attention import FLASH, mosaic_attention, obstacle
from moe.kernels.choice import Devices, devices_of
from moe.ops.attention import Flash, flash_attention, plain_attention
from moe.ops.mask import Mask, visible

IMPLEMENTATIONS = ("plain", "blocked", "xla", "cudnn", "mosaic")
MAX_PLAIN_SCORES_CPU = 2**21
"""Number of scores up to which "plain" is faster on a CPU: about as many as its caches hold."""
MAX_PLAIN_SCORES_ACCELERATOR = 2**28
"""Number of scores up to which another device computes all at once: 1 GiB of float32 per layer."""


def core_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch source kv_heads head_dim"],
    value: Float[Array, "batch source kv_heads v_head_dim"],
    mask: Mask,
    scale: float | None = None,
    implementation: str | None = None,
    sinks: Float[Array, "heads"] | None = None,
    devices: Devices | None = None,
) -> Float[Array, "batch time heads v_head_dim"]:
    """``softmax(scale q k) v`` over the visible positions, by the named implementation.

    "plain" is `plain_attention`; "blocked" is `moe.attention.blocked`, the same block by block with
    a custom gradient. "xla" and "cudnn" are implementations of `jax.nn.dot_product_attention`
    (`moe.attention.fused`); the second is FlashAttention on an NVIDIA GPU: scores and their
    gradients stay on the chip. "mosaic" are kernels of our own for Hopper
    (`moe.kernels.attention`), which never need a mask of queries times keys. The output of a query
    that sees no key differs between them; it is finite and never used.

    Args:
      scale: multiplies the scores; None is ``head_dim**-0.5``.
      implementation: None is the first of `moe.implementations.DEFAULTS` that supports the arrays,
        but "plain" instead of "blocked" for no more scores than `MAX_PLAIN_SCORES_CPU` on a CPU or
        `MAX_PLAIN_SCORES_ACCELERATOR` elsewhere.
      sinks: as for `plain_attention`; to "xla" and "cudnn" they are keys
        (`moe.attention.fused`).
      devices: for the choice of None and of sizes of blocks; None is this process's.

    Raises:
      ValueError: on an unknown name, and where the named implementation does not support the call.

    References:
      Dao, "FlashAttention-2", 2023. https://arxiv.org/abs/2307.08691
    """
    devices = devices or devices_of()
    if implementation is None:
        implementation = _select_implementation(query, key, value, mask, sinks, devices)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"execution.attention={implementation!r} is not known: "
            f"choose among {', '.join(IMPLEMENTATIONS)}, or None for the best that applies."
        )
    if implementation == "plain":
        seen = visible(mask.query, mask.key, mask.window)
        return plain_attention(query, key, value, seen, scale, sinks)
    if implementation == "blocked":
        return flash_attention(_blocked(devices), query, key, value, mask, scale, sinks)
    if implementation == "mosaic":
        _check_kernel(query, key, value)
        return mosaic_attention(query, key, value, mask, scale, sinks)
    if implementation == "xla":
        return fused_attention(query, key, value, mask, scale, "xla", sinks)
    reason = cudnn_obstacle(query, value, mask, sinks)
    if reason is not None:
        raise ValueError(f'execution.attention="cudnn" is not supported here: {reason}.')
    return fused_attention(query, key, value, mask, scale, "cudnn", sinks)


def flash_of(
    implementation: str | None,
    query: Array,
    key: Array,
    value: Array,
    devices: Devices | None = None,
) -> Flash:
    """Flash attention over a subset of the keys, for callers that merge the results: "mosaic", and
    "blocked" for any other name. None is "mosaic" on Hopper if it supports the arrays.

    Args:
      query, key, value: with any number of dimensions before the last.
      devices: for the choice of None; None is this process's.

    Raises:
      ValueError: where "mosaic" is named and does not support the arrays.
    """
    devices = devices or devices_of()
    if implementation is None and _has_kernel(query, key, value, devices):
        return FLASH
    if implementation != "mosaic":
        return _blocked(devices)
    _check_kernel(query, key, value)
    return FLASH


def _blocked(devices: Devices) -> Flash:
    """Attention in blocks of the sizes for these devices."""
    return BLOCKED_ON_GPU if devices.platform == "gpu" else BLOCKED


def _check_kernel(query: Array, key: Array, value: Array) -> None:
    reason = obstacle(query, key, value)
    if reason is not None:
        raise ValueError(
            f'execution.attention="mosaic" is not supported here: {reason}; choose "blocked", or '
            "None for the best that applies."
        )


def _has_kernel(query: Array, key: Array, value: Array, devices: Devices) -> bool:
    return devices.is_hopper and obstacle(query, key, value) is None


def _select_implementation(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    sinks: Array | None,
    devices: Devices,
) -> str:
    """Name of the implementation that None selects for these arrays: the first that supports them
    of `moe.implementations.DEFAULTS`."""
    if cudnn_obstacle(query, value, mask, sinks) is None:
        return "cudnn"
    if _has_kernel(query, key, value, devices):
        return "mosaic"
    batch, time, heads, _ = query.shape
    max_scores = MAX_PLAIN_SCORES_CPU if devices.platform == "cpu" else MAX_PLAIN_SCORES_ACCELERATOR
    return "blocked" if batch * heads * time * key.shape[1] > max_scores else "plain"
