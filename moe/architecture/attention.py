"""Attention options (MLA, windows, rotary), and checks of which of them may be combined.

Functions take a `moe.config.ModelConfig`, whose constructor calls them.
"""

from dataclasses import dataclass
from typing import Any

UNSUPPORTED_WITH_LATENT_ATTENTION = (
    "qkv_bias",
    "attention_gate",
    "attention_out_bias",
    "attention_sinks",
    "attention_scale",
    "query_key_norm",
    "rotary_dim",
    "window_rope_base",
    "nope_layers",
)
"""Fields of `ModelConfig` that multi-head latent attention does not support."""


@dataclass(frozen=True)
class MultiHeadLatentAttention:
    """Multi-head latent attention (MLA): keys and values come from one latent vector per token.

    Fields have the names of DeepSeek's config.json.

    Args:
      kv_lora_rank: width of the vector that keys and values are expanded from.
      q_lora_rank: width of the one that queries are expanded from; None makes queries directly.
      qk_rope_head_dim: elements of a query and of a key that are rotated, even, part of `head_dim`;
        those of the key are the same for all heads.
      v_head_dim: width of a value head.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    v_head_dim: int


def check_attention(config: Any) -> None:
    if config.norm_placement not in ("before", "after", "both"):
        raise ValueError(
            f'norm_placement={config.norm_placement!r} must be "before", "after" or "both".'
        )
    if config.query_key_norm not in (None, "head", "projection"):
        raise ValueError(
            f'query_key_norm={config.query_key_norm!r} must be "head", "projection" or None.'
        )
    if config.attention_scale is not None and not config.attention_scale > 0:
        raise ValueError(
            f"attention_scale={config.attention_scale} must be above 0; None is head_dim**-0.5."
        )
    for name in ("sliding_window", "max_positions"):
        limit = getattr(config, name)
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit} must be at least 1; None is no limit.")
    full = config.full_attention_layers
    if full and (config.sliding_window is None or not set(full) < set(range(config.num_layers))):
        raise ValueError(
            f"full_attention_layers={full} must be some but not all of the layers 0 to "
            f"{config.num_layers - 1}, and the others need a window (sliding_window="
            f"{config.sliding_window}): leave both out if all layers have full attention."
        )
    if config.attention_gate and config.qkv_bias:
        raise ValueError(
            "attention_gate=True does not support qkv_bias=True: leave one of them out."
        )
    _check_rotation(config)
    mla = config.mla
    if mla is None:
        return
    for name in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim"):
        size = getattr(mla, name)
        if size is not None and size < 1:
            raise ValueError(f"mla.{name}={size} must be at least 1.")
    if mla.qk_rope_head_dim % 2 or mla.qk_rope_head_dim >= config.head_dim:
        raise ValueError(
            f"mla.qk_rope_head_dim={mla.qk_rope_head_dim} must be even and below head_dim="
            f"{config.head_dim}, which includes it."
        )
    if config.num_kv_heads != config.num_heads:
        raise ValueError(
            f"num_kv_heads={config.num_kv_heads} must equal num_heads={config.num_heads} with "
            "latent attention (mla)."
        )
    for name in UNSUPPORTED_WITH_LATENT_ATTENTION:
        if getattr(config, name):
            raise ValueError(
                f"latent attention (mla) does not support {name}="
                f"{getattr(config, name)!r}: leave it out."
            )


def _check_rotation(config: Any) -> None:
    dim, nope, base = config.rotary_dim, config.nope_layers, config.window_rope_base
    if dim is not None and (dim % 2 or not 0 < dim <= config.head_dim):
        raise ValueError(
            f"rotary_dim={dim} must be even and in 2..head_dim={config.head_dim}; None rotates all."
        )
    if not set(nope) <= set(range(config.num_layers)):
        raise ValueError(
            f"nope_layers={nope} must be among the layers 0 to {config.num_layers - 1}."
        )
    if base is not None and (config.sliding_window is None or not base > 0):
        raise ValueError(
            f"window_rope_base={base} must be above 0 and needs layers with a window, not "
            f"sliding_window={config.sliding_window}: leave it out if all layers have "
            "one RoPE base."
        )
    scaling = config.rope_scaling
    if (nope or base is not None) and scaling is not None and scaling.score_factor != 1:
        raise ValueError(
            f"rope_scaling={scaling} scales the scores of every layer, which is not "
            f"supported with nope_layers={nope} and window_rope_base={base}: leave out "
            "score_temperature."
        )
