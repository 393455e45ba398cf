"""Checks of the decode attention kernel against a network's configuration, and the memory that it
takes."""

import math

from moe.attention.latent import caches_latent
from moe.config import ModelConfig
from moe.implementations import selected_implementation, unsupported_by_decode_kernel
from moe.kernels import decode_attention, latent_decode
from moe.kernels.choice import NAMES
from sharding.folding import FoldedMesh


def check_kernel(config: ModelConfig) -> None:
    """Checks, before anything is traced, that the kernel of `Execution.decode_attention` supports
    the network. The device is checked when a program is lowered.

    Raises:
      ValueError: if it does not, with the rule and the fix.
    """
    obstacle = kernel_obstacle(config)
    if obstacle is not None:
        name = config.execution.decode_attention
        raise ValueError(f"decode_attention={name!r} {obstacle}; use None.")


def kernel_obstacle(config: ModelConfig) -> str | None:
    """The reason why the named kernel does not support the network's heads, as the end of a
    sentence; None if it does, or if none is named."""
    name = config.execution.decode_attention
    if name is None or name == "plain":
        return None
    if name not in NAMES:
        return f"is not known: choose among {', '.join(map(repr, NAMES))}"
    if name == "interpreted":
        return "is not supported: Pallas's interpreter has no matrix units"
    reason = unsupported_by_decode_kernel(config)
    return None if reason is None else f"is not supported: {reason}"


def kernel_bytes(config: ModelConfig, mesh: FoldedMesh, rows: int, columns: int) -> int:
    """Bytes on one device of the decode kernel's partial results before they are merged; 0 if no
    kernel runs. They are those of one layer, as layers run one after the other.

    Args:
      rows: rows that a device decodes at a time.
      columns: columns of the cache that are read.
    """
    if selected_implementation(config, "decode_attention") in (None, "plain"):
        return 0
    tp = mesh.size(mesh.tp)
    heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
    if config.mla is not None and caches_latent(config):
        partial_results = latent_decode.output_shapes(rows, heads, config.mla.kv_lora_rank, columns)
    else:
        partial_results = decode_attention.output_shapes(
            rows, heads, kv_heads, config.v_head_dim, columns
        )
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in partial_results)
