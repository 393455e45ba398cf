"""Options of MoE architectures: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE."""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.families.family import Fields
from moe.huggingface.families.shared_options import (
    head_dim_of,
    read_dense_layers,
    require_no_biases,
    write_dense_layers,
)
from moe.huggingface.families.windows import read_windows, slides_alternately, write_windows
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import read_rotary, write_rotary


def read_mixtral(options: Options, fields: Fields) -> Fields:
    return {
        "head_dim": head_dim_of(options, fields),
        "num_experts": options.take("num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("intermediate_size"),
        "sliding_window": options.take("sliding_window", default=None),
        **read_rotary(options, default_base=1e6),
    }


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "intermediate_size": config.d_expert,
        "sliding_window": config.sliding_window,
        **write_rotary(config),
    }


def read_qwen2_moe(options: Options, fields: Fields) -> Fields:
    options.require("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "head_dim": fields["d_model"] // fields["num_heads"],
        "qkv_bias": options.take("qkv_bias", default=True),
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("moe_intermediate_size"),
        "d_ff": options.take("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
        **read_windows(options, fields, slides_alternately),
        "renormalise": options.take("norm_topk_prob", default=False),
        **read_dense_layers(options, fields),
        **read_rotary(options),
    }


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_windows(config),
        "qkv_bias": config.qkv_bias,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "shared_expert_intermediate_size": config.d_ff,
        "norm_topk_prob": config.renormalise,
        **write_dense_layers(config),
        **write_rotary(config),
    }


def read_qwen3_moe(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias", "qkv_bias")
    # What Qwen3-Coder says of what every Qwen3-MoE is.
    options.require("use_qk_norm", True, default=True)
    options.require("shared_expert_intermediate_size", 0, None)
    return {
        "head_dim": head_dim_of(options, fields),
        "query_key_norm": "head",
        **read_windows(options, fields, None),
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("moe_intermediate_size"),
        "renormalise": options.take("norm_topk_prob", default=False),
        **read_dense_layers(options, fields),
        **read_rotary(options),
    }


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_windows(config, listed=False),
        "attention_bias": False,
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "norm_topk_prob": config.renormalise,
        **write_dense_layers(config),
        **write_rotary(config),
    }


def read_olmoe(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    options.require("clip_qkv", None)
    options.require("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "head_dim": fields["d_model"] // fields["num_heads"],
        "query_key_norm": "projection",
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("intermediate_size"),
        "renormalise": options.take("norm_topk_prob", default=False),
        **read_rotary(options),
    }


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "intermediate_size": config.d_expert,
        "norm_topk_prob": config.renormalise,
        **write_rotary(config),
    }
