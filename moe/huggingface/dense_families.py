"""Architectures without experts: Llama, Mistral, Qwen2, Qwen3, OLMo 3, SmolLM3, Gemma 3."""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.family import (
    NORMS_AFTER,
    QKV_BIASES,
    QUERY_KEY_NORMS,
    Family,
    Fields,
    OptionGroup,
    Stored,
    plus_one,
)
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import rotary, rotary_by_window
from moe.huggingface.shared_options import (
    DENSE_WIDTH,
    DERIVED_HEAD_DIM,
    HEAD_DIM,
    NO_ATTENTION_BIAS,
    NO_MLP_BIAS,
    activation,
    fixed,
    head,
    listed_windows,
    option,
    read_listed_windows,
    required,
    slides_last,
    windows,
    write_listed_windows,
)

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    (NO_ATTENTION_BIAS, NO_MLP_BIAS, DENSE_WIDTH, HEAD_DIM, rotary()),
    {},
)
MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    # What `transformers` takes where the file says nothing of a window.
    (DENSE_WIDTH, HEAD_DIM, option("sliding_window", default=4096), rotary()),
    {},
)
QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    (DERIVED_HEAD_DIM, windows(slides_last), DENSE_WIDTH, fixed(qkv_bias=True), rotary()),
    QKV_BIASES,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    (
        windows(slides_last),
        NO_ATTENTION_BIAS,
        DENSE_WIDTH,
        option("head_dim", default=128),
        fixed(query_key_norm="head"),
        rotary(),
    ),
    QUERY_KEY_NORMS,
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    (
        NO_ATTENTION_BIAS,
        DENSE_WIDTH,
        HEAD_DIM,
        fixed(norm_placement="after", query_key_norm="projection"),
        # Three of four layers where the file lists none.
        listed_windows(4096, lambda layer: (layer + 1) % 4 != 0),
        rotary_by_window(500_000.0),
    ),
    {**QUERY_KEY_NORMS, **NORMS_AFTER},
)


def read_unrotated_layers(options: Options, fields: Fields) -> Fields:
    """SmolLM3's layers without rotary positions, which alone may have windows."""
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
    windows_of_file = read_listed_windows(
        options, fields, None, lambda layer: slides and layer in nope_layers
    )
    if windows_of_file and not slides:
        raise options.unsupported(
            "layer_types", options.values["layer_types"], "windows with use_sliding_window=true"
        )
    return {"nope_layers": nope_layers, **windows_of_file}


def write_unrotated_layers(config: ModelConfig) -> dict[str, Any]:
    """The options that `read_unrotated_layers` reads."""
    return {
        "no_rope_layers": [
            int(layer not in config.nope_layers) for layer in range(config.num_layers)
        ],
        "use_sliding_window": config.sliding_window is not None,
        **write_listed_windows(config),
    }


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "smollm3",
    (
        NO_ATTENTION_BIAS,
        NO_MLP_BIAS,
        DENSE_WIDTH,
        HEAD_DIM,
        head(tied=True),
        OptionGroup(read_unrotated_layers, write_unrotated_layers),
        rotary(default_base=2e6),
    ),
    {},
)


def read_gemma3(options: Options, fields: Fields) -> Fields:
    """Gemma's scale of scores, and the layers with sliding windows, listed or by a period."""
    scalar = options.take("query_pre_attn_scalar", default=256)
    period = options.take("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return {
        "attention_scale": None if scalar == fields["head_dim"] else scalar**-0.5,
        **read_listed_windows(options, fields, 4096, lambda layer: (layer + 1) % period != 0),
    }


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    """The options that `read_gemma3` reads, and the base of layers with windows."""
    scale, local = config.attention_scale, config.window_rope_base
    return {
        "query_pre_attn_scalar": config.head_dim if scale is None else round(scale**-2),
        "rope_local_base_freq": config.rope_base if local is None else local,
        **write_listed_windows(config),
    }


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    (
        NO_ATTENTION_BIAS,
        required("use_bidirectional_attention", written=False),
        required("attn_logit_softcapping", None),
        required("final_logit_softcapping", None),
        DENSE_WIDTH,
        option("head_dim", default=256),
        fixed(norm_placement="both", query_key_norm="head", embedding_scale=None),
        head(tied=True),
        activation("hidden_activation", "gelu_pytorch_tanh"),
        OptionGroup(read_gemma3, write_gemma3),
        rotary_by_window(1_000_000.0, window_base=10_000.0),
    ),
    plus_one(
        {
            **QUERY_KEY_NORMS,
            "attention.norm": "input_layernorm.weight",
            "attention.out_norm": "post_attention_layernorm.weight",
            "norm": "pre_feedforward_layernorm.weight",
            "out_norm": "post_feedforward_layernorm.weight",
        }
    ),
    last_norm=Stored("model.norm.weight", offset=1.0),
)
