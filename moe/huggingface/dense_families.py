"""Options of architectures without experts.

They are Llama, Mistral, Qwen2, Qwen3, OLMo 3, SmolLM3 and Gemma 3.
"""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.family import (
    NORMS_AFTER,
    QKV_BIASES,
    QUERY_KEY_NORMS,
    Family,
    Fields,
    Stored,
    plus_one,
)
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import (
    read_rotary,
    read_rotary_by_window,
    write_rotary,
    write_rotary_by_window,
)
from moe.huggingface.shared_options import (
    head_dim_of,
    read_activation,
    read_listed_windows,
    read_windows,
    require_no_biases,
    slides_last,
    write_activation,
    write_listed_windows,
    write_windows,
)


def read_llama(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias", "mlp_bias")
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        **read_rotary(options),
    }


def write_llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        **write_rotary(config),
    }


LLAMA = Family("LlamaForCausalLM", "llama", read_llama, write_llama, {})


def read_mistral(options: Options, fields: Fields) -> Fields:
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        # What `transformers` takes where the file says nothing.
        "sliding_window": options.take("sliding_window", default=4096),
        **read_rotary(options),
    }


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        **write_rotary(config),
    }


MISTRAL = Family("MistralForCausalLM", "mistral", read_mistral, write_mistral, {})


def read_qwen2(options: Options, fields: Fields) -> Fields:
    options.require("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": fields["d_model"] // fields["num_heads"],
        "qkv_bias": True,
        **read_windows(options, fields, slides_last),
        **read_rotary(options),
    }


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_windows(config),
        "intermediate_size": config.d_ff,
        **write_rotary(config),
    }


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", read_qwen2, write_qwen2, QKV_BIASES)


def read_qwen3(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": options.take("head_dim", default=128),
        "query_key_norm": "head",
        **read_windows(options, fields, slides_last),
        **read_rotary(options),
    }


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_windows(config),
        "attention_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        **write_rotary(config),
    }


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", read_qwen3, write_qwen3, QUERY_KEY_NORMS)


def read_olmo3(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        "norm_placement": "after",
        "query_key_norm": "projection",
        # Three of four layers where the file lists none.
        **read_listed_windows(options, fields, 4096, lambda layer: (layer + 1) % 4 != 0),
        **read_rotary_by_window(options, 500_000.0),
    }


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        **write_listed_windows(config),
        **write_rotary_by_window(config),
    }


OLMO3 = Family(
    "Olmo3ForCausalLM", "olmo3", read_olmo3, write_olmo3, {**QUERY_KEY_NORMS, **NORMS_AFTER}
)


def read_smollm3(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias", "mlp_bias")
    layers = range(fields["num_layers"])
    interval = options.take("no_rope_layer_interval", default=4)
    listed = options.take("no_rope_layers", default=None)
    # 1 is a layer that rotates.
    rotates = [(layer + 1) % interval != 0 for layer in layers] if listed is None else listed
    if len(rotates) < len(layers) or any(flag not in (0, 1) for flag in rotates):
        raise options.unsupported("no_rope_layers", listed, "1 or 0 for each layer")
    nope_layers = tuple(layer for layer in layers if not rotates[layer])
    # Without the first option the file may still name a window, which nothing has.
    slides = options.take("use_sliding_window", default=False)
    windows = read_listed_windows(
        options, fields, None, lambda layer: slides and layer in nope_layers
    )
    if windows and not slides:
        raise options.unsupported(
            "layer_types", options.values["layer_types"], "windows with use_sliding_window=true"
        )
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        "head": "tied" if options.take("tie_word_embeddings", default=True) else "untied",
        "nope_layers": nope_layers,
        **windows,
        **read_rotary(options, default_base=2e6),
    }


def write_smollm3(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        "no_rope_layers": [
            int(layer not in config.nope_layers) for layer in range(config.num_layers)
        ],
        "use_sliding_window": config.sliding_window is not None,
        **write_listed_windows(config),
        **write_rotary(config),
    }


SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", read_smollm3, write_smollm3, {})


def read_gemma3(options: Options, fields: Fields) -> Fields:
    """Of its text networks: norms before and after, two RoPE bases, GEGLU."""
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


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    read_gemma3,
    write_gemma3,
    plus_one(
        {
            "attention.norm": "input_layernorm",
            "attention.out_norm": "post_attention_layernorm",
            "norm": "pre_feedforward_layernorm",
            "out_norm": "post_feedforward_layernorm",
            "attention.query_norm": "self_attn.q_norm",
            "attention.key_norm": "self_attn.k_norm",
        }
    ),
    last_norm=Stored("model.norm.weight", offset=1.0),
)
