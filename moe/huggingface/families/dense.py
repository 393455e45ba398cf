"""Options of architectures without experts: Llama, Mistral, Qwen2, Qwen3."""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.families.family import Fields
from moe.huggingface.families.shared_options import (
    head_dim_of,
    require_no_biases,
)
from moe.huggingface.families.windows import read_windows, slides_last, write_windows
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import read_rotary, write_rotary


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
