"""Weights of Gated DeltaNet.

Axes: ``delta_layer d_model``; ``delta_key_head`` and ``delta_value_head``, sharded over ``tp``, and
the width of the latter, ``delta_value_dim``; ``delta_in``, the projections of a key head: query,
key, the values and the gates of its value heads; ``delta_pair``, their strengths and then their
decays; ``delta_channel``, all queries, then all keys, then all values; ``delta_width``, the tokens
that a filter reads.
"""

from typing import Generic, TypeVar

from flax import struct

from moe.architecture.weight import Weight, norm_weight
from moe.config import ModelConfig

Leaf = TypeVar("Leaf")


@struct.dataclass
class DeltaNet(Generic[Leaf]):
    """Weights of a Gated DeltaNet layer, with Qwen3-Next's names in parentheses.

    The decay of a value head is ``exp(-exp(log_rate) softplus(x + rate_bias))``.

    Attributes:
      norm: norm before the layer, as that of attention.
      inward: projections of a token to queries, keys, values and gates (`in_proj_qkvz`).
      strength_and_decay: projections to the strength (beta) and the x of the decay of each value
        head (`in_proj_ba`).
      filters: filters of the short convolution of queries, keys and values (`conv1d`).
      rate_bias: of the decay (`dt_bias`).
      log_rate: of the decay (`A_log`).
      read_norm: norm of the output of each value head, which its gate then multiplies (`norm`).
      out: output projection (`out_proj`).
      out_norm: norm of the layer's output, as that of attention; None without.
    """

    norm: Leaf
    inward: Leaf
    strength_and_decay: Leaf
    filters: Leaf
    rate_bias: Leaf
    log_rate: Leaf
    read_norm: Leaf
    out: Leaf
    out_norm: Leaf | None = None


def delta_weights(config: ModelConfig, out_scale: float) -> DeltaNet[Weight]:
    """Table of these weights.

    Args:
      out_scale: scale of the initial values of the output projection.
    """
    norm, fan_in = norm_weight("delta_layer d_model"), "d_model"
    return DeltaNet(
        norm=norm,
        inward=Weight("delta_layer d_model delta_key_head delta_in", fan_in),
        strength_and_decay=Weight("delta_layer d_model delta_key_head delta_pair", fan_in),
        filters=Weight("delta_layer delta_channel delta_width", "delta_width"),
        # A state loses a twentieth per token at the start, more or less as the token says.
        rate_bias=Weight("delta_layer delta_value_head", scale=-3.0, float32=True),
        log_rate=Weight("delta_layer delta_value_head", scale=0.0, float32=True),
        read_norm=norm_weight("delta_layer delta_value_dim"),
        out=Weight(
            "delta_layer delta_value_head delta_value_dim d_model",
            "delta_value_head delta_value_dim",
            out_scale,
        ),
        out_norm=norm if config.norm_placement == "both" else None,
    )


def delta_sizes(config: ModelConfig) -> dict[str, int]:
    """Sizes of the axes, and of ``attention_layer``, the layers that keep attention; empty without
    Gated DeltaNet."""
    delta = config.delta
    if delta is None:
        return {}
    keys, values = delta.num_key_heads, delta.num_value_heads
    return {
        "attention_layer": config.num_layers - len(delta.layers),
        "delta_layer": len(delta.layers),
        "delta_key_head": keys,
        "delta_value_head": values,
        "delta_value_dim": delta.value_head_dim,
        "delta_in": delta.content_dim + delta.values_per_key * delta.value_head_dim,
        "delta_pair": 2 * delta.values_per_key,
        "delta_channel": keys * delta.content_dim,
        "delta_width": delta.conv_width,
    }
