"""Whether a kernel can read a network's cache, and what it writes then: what of that the
configuration says."""

import math

from moe.attention.latent import keeps_narrow
from moe.config import ModelConfig
from moe.kernels import decode_attention, latent_decode
from moe.kernels.choice import NAMES
from moe.layers.implementations import chosen, unserved_by_decode_kernel
from sharding.folding import FoldedMesh


def check_kernel(config: ModelConfig) -> None:
    """Refuses, before anything is traced, what `Execution.decode_attention` names where it cannot
    serve. Which device it is lowered for, a program says.

    Raises:
      ValueError: naming what it cannot serve, the rule, and what to use.
    """
    obstacle = kernel_obstacle(config)
    if obstacle is not None:
        name = config.execution.decode_attention
        raise ValueError(f"decode_attention={name!r} {obstacle}; use None.")


def kernel_obstacle(config: ModelConfig) -> str | None:
    """What keeps the kernel that is named from the network's heads, as the rest of a sentence; None
    where it serves, or none is named."""
    name = config.execution.decode_attention
    if name is None or name == "plain":
        return None
    if name not in NAMES:
        return f"is none of {', '.join(map(repr, NAMES))}"
    if name == "interpreted":
        return "cannot serve: the plain interpreter has no matrix units"
    reason = unserved_by_decode_kernel(config)
    return None if reason is None else f"cannot serve: {reason}"


def kernel_bytes(config: ModelConfig, mesh: FoldedMesh, rows: int, columns: int) -> int:
    """Bytes on one device of what the kernel of a decoding step leaves to be merged, of a layer, as
    the next one's come after it; 0 where none runs.

    Args:
      rows: that a device decodes at a time.
      columns: of the cache that are read.
    """
    if chosen(config, "decode_attention") in (None, "plain"):
        return 0
    tp = mesh.size(mesh.tp)
    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    if config.mla is not None and keeps_narrow(config):
        parts = latent_decode.written(rows, heads, config.mla.kv_lora_rank, columns)
    else:
        parts = decode_attention.written(rows, heads, kv_heads, config.v_head_dim, columns)
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
