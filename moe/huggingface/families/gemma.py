"""Options of Gemma 3, its text networks: norms before and after, two RoPE bases, GEGLU."""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.families.family import Fields, Stored
from moe.huggingface.families.shared_options import (
    read_activation,
    require_no_biases,
    write_activation,
)
from moe.huggingface.families.windows import read_listed_windows, write_listed_windows
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import read_rotary_by_window, write_rotary_by_window

LAST_NORM = Stored("model.norm.weight", offset=1.0)
GEMMA3_NAMES = {
    path: Stored(f"{name}.weight", offset=1.0)
    for path, name in {
        "attention.norm": "input_layernorm",
        "attention.out_norm": "post_attention_layernorm",
        "norm": "pre_feedforward_layernorm",
        "out_norm": "post_feedforward_layernorm",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
    }.items()
}


def read_gemma3(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias", "use_bidirectional_attention")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        options.require(name, None)
    head_dim = options.take("head_dim", default=256)
    scalar = options.take("query_pre_attn_scalar", default=256)
    period = options.take("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim,
        "attention_scale": None if scalar == head_dim else scalar**-0.5,
        "activation": read_activation(options, "hidden_activation", "gelu_pytorch_tanh"),
        "norm_placement": "both",
        "query_key_norm": "head",
        "embedding_scale": None,
        "head": "tied" if options.take("tie_word_embeddings", default=True) else "untied",
        **read_listed_windows(options, fields, 4096, lambda layer: (layer + 1) % period != 0),
        **read_rotary_by_window(options, 1_000_000.0, window_base=10_000.0),
    }


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    scale, local = config.attention_scale, config.window_rope_base
    return {
        "attention_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
        "hidden_activation": write_activation(config),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_local_base_freq": config.rope_base if local is None else local,
        **write_listed_windows(config),
        **write_rotary_by_window(config),
    }
