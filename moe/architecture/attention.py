"""Attention options (MLA, windows, rotary, Gated DeltaNet), and checks of which may be combined.

Functions take a `moe.config.ModelConfig`, whose constructor calls them.
"""

from collections.abc import Hashable, Sequence
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

UNSUPPORTED_WITH_DELTA = ("mla", "num_dense_layers")
"""Fields of `ModelConfig` that a network with Gated DeltaNet does not support."""


@dataclass(frozen=True)
class MultiHeadLatentAttention:
    """Multi-head latent attention (MLA): keys and values come from one latent vector per token.

    Fields have the names of DeepSeek's config.json.

    Args:
      kv_lora_rank: width of the vector that keys and values are expanded from.
      q_lora_rank: width of the one that queries are expanded from; None makes queries directly.
      qk_rope_head_dim: elements of a query and of a key that are rotated, even, part of `head_dim`;
        the key's are the same for all heads.
      v_head_dim: width of a value head.
    """

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    v_head_dim: int


def check_attention(config: Any) -> None:
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


def period_of(kinds: Sequence[Hashable]) -> int:
    """The smallest number of layers whose repetition gives a stack of layers of these types; the
    depth if nothing repeats."""
    depth = len(kinds)
    return next(
        period
        for period in range(1, depth + 1)
        if depth % period == 0 and list(kinds) == list(kinds[:period]) * (depth // period)
    )


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule (`moe.attention.delta`) in the place of attention.

    Args:
      layers: indices of the layers that have it; the others have attention.
      num_key_heads: heads of queries and keys.
      num_value_heads: a multiple of it: neighbouring value heads share a key head.
      key_head_dim: width of a query and of a key.
      value_head_dim: width of a value.
      conv_width: tokens that the convolution before it reads, the own one included.

    References:
      Yang et al., "Gated Delta Networks", 2024. https://arxiv.org/abs/2412.06464
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def content_dim(self) -> int:
        """Width of a key head's query, key and values, side by side."""
        return 2 * self.key_head_dim + self.values_per_key * self.value_head_dim


def delta_layers(config: Any) -> tuple[int, ...]:
    """Indices of the layers with Gated DeltaNet; none in most networks."""
    return () if config.delta is None else config.delta.layers


def check_delta(config: Any) -> None:
    delta = config.delta
    if delta is None:
        return
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        if getattr(delta, name) < 1:
            raise ValueError(f"delta.{name}={getattr(delta, name)} must be at least 1.")
    if delta.conv_width < 2:
        raise ValueError(f"delta.conv_width={delta.conv_width} must be at least 2.")
    if delta.num_value_heads % delta.num_key_heads:
        raise ValueError(
            f"delta.num_value_heads={delta.num_value_heads} is not a multiple of num_key_heads="
            f"{delta.num_key_heads}: each key head serves the same number of value heads."
        )
    valid = sorted(set(delta.layers) & set(range(config.num_layers)))
    if list(delta.layers) != valid or not 0 < len(valid) < config.num_layers:
        raise ValueError(
            f"delta.layers={delta.layers} must be some but not all of the layers 0 to "
            f"{config.num_layers - 1}, in ascending order; the others have attention."
        )
    for name in UNSUPPORTED_WITH_DELTA:
        if getattr(config, name):
            raise ValueError(
                f"layers with Gated DeltaNet do not support {name}={getattr(config, name)!r}: "
                "leave it out."
            )
    kinds = [layer in delta.layers for layer in range(config.num_layers)]
    if config.execution.scan_layers and 2 * period_of(kinds) > config.num_layers:
        raise ValueError(
            f"scan_layers=True needs layer types that repeat with a period, and delta.layers="
            f"{delta.layers} of {config.num_layers} layers do not: leave scan_layers out."
        )
