"""Options of architectures with experts.

They are Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4.5, gpt-oss and Qwen3-Next.
"""

from typing import Any

from moe.architecture.activation import ClampedSwiGLU
from moe.config import GatedDeltaNet, ModelConfig, MultiHeadLatentAttention
from moe.huggingface.family import (
    LATENT_ATTENTION,
    PROJECTED_EXPERTS,
    QKV_BIASES,
    QUERY_KEY_NORMS,
    SELECTION_BIAS,
    Family,
    Fields,
    Stored,
    dense_names,
    expert_names,
    plus_one,
)
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import (
    read_rotary,
    read_rotary_dim,
    write_rotary,
    write_rotary_dim,
)
from moe.huggingface.shared_options import (
    FULL,
    head_dim_of,
    read_dense_layers,
    read_experts,
    read_grouped_experts,
    read_listed_windows,
    read_windows,
    require_no_biases,
    slides_alternately,
    write_dense_layers,
    write_experts,
    write_grouped_experts,
    write_listed_windows,
    write_windows,
)


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


MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    read_mixtral,
    write_mixtral,
    expert_names("block_sparse_moe", "w1", "w3", "w2"),
)


def read_qwen2_moe(options: Options, fields: Fields) -> Fields:
    options.require("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "head_dim": fields["d_model"] // fields["num_heads"],
        "qkv_bias": options.take("qkv_bias", default=True),
        **read_experts(options, normalises=False),
        "d_ff": options.take("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
        **read_windows(options, fields, slides_alternately),
        **read_dense_layers(options, fields),
        **read_rotary(options),
    }


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_windows(config),
        "qkv_bias": config.qkv_bias,
        **write_experts(config),
        "shared_expert_intermediate_size": config.d_ff,
        **write_dense_layers(config),
        **write_rotary(config),
    }


SHARED_EXPERT = {
    **dense_names("mlp.shared_expert"),
    "shared_gate": "mlp.shared_expert_gate.weight",
}
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    read_qwen2_moe,
    write_qwen2_moe,
    {**QKV_BIASES, **PROJECTED_EXPERTS, **SHARED_EXPERT},
)


def read_qwen3_moe(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    return {
        "head_dim": head_dim_of(options, fields),
        "query_key_norm": "head",
        **read_windows(options, fields, None),
        **read_experts(options, normalises=False),
        **read_dense_layers(options, fields),
        **read_rotary(options),
    }


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_windows(config, listed=False),
        "attention_bias": False,
        "head_dim": config.head_dim,
        **write_experts(config),
        **write_dense_layers(config),
        **write_rotary(config),
    }


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    read_qwen3_moe,
    write_qwen3_moe,
    {**QUERY_KEY_NORMS, **PROJECTED_EXPERTS},
    fused_in_peft=True,
)


def read_olmoe(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    options.require("clip_qkv", None)
    options.require("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "head_dim": fields["d_model"] // fields["num_heads"],
        "query_key_norm": "projection",
        **read_experts(options, normalises=False, width="intermediate_size"),
        **read_rotary(options),
    }


def write_olmoe(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "clip_qkv": None,
        **write_experts(config, "intermediate_size"),
        **write_rotary(config),
    }


OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    read_olmoe,
    write_olmoe,
    {**QUERY_KEY_NORMS, **PROJECTED_EXPERTS},
)


def read_deepseek(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    options.require("scoring_func", "sigmoid", default="sigmoid")
    options.require("topk_method", "noaux_tc", default="noaux_tc")
    options.require("moe_layer_freq", 1, default=1)
    options.take("head_dim", default=None)  # of the rotated part, as the next
    qk_rope_head_dim = options.take("qk_rope_head_dim")
    return {
        "head_dim": options.take("qk_nope_head_dim") + qk_rope_head_dim,
        "mla": MultiHeadLatentAttention(
            kv_lora_rank=options.take("kv_lora_rank"),
            q_lora_rank=options.take("q_lora_rank"),
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=options.take("v_head_dim"),
        ),
        "rope_interleaved": options.take("rope_interleave", default=True),
        **read_grouped_experts(options, {"first_k_dense_replace": 0}),
        **read_rotary(options, temperatures=True),
    }


def write_deepseek(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    if mla is None:
        return {}
    return {
        "attention_bias": False,
        "qk_nope_head_dim": config.head_dim - mla.qk_rope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "kv_lora_rank": mla.kv_lora_rank,
        "q_lora_rank": mla.q_lora_rank,
        "rope_interleave": config.rope_interleaved,
        **write_grouped_experts(config),
        **write_rotary(config),
    }


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    read_deepseek,
    write_deepseek,
    {**LATENT_ATTENTION, **PROJECTED_EXPERTS, **dense_names("mlp.shared_experts")},
    also=("kimi_k2",),
    predicts_further=True,
    fused_in_peft=True,
)

GLM_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def read_glm4_moe(options: Options, fields: Fields) -> Fields:
    head_dim = head_dim_of(options, fields)
    return {
        "head_dim": head_dim,
        "qkv_bias": options.take("attention_bias", default=False),
        "query_key_norm": "head" if options.take("use_qk_norm", default=False) else None,
        **read_grouped_experts(options, GLM_DEFAULTS),
        **read_rotary_dim(options, head_dim, default=0.5),
        **read_rotary(options, partial=True),
    }


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_dim,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.query_key_norm is not None,
        **write_grouped_experts(config),
        **write_rotary_dim(config),
        **write_rotary(config),
    }


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    read_glm4_moe,
    write_glm4_moe,
    {
        **QKV_BIASES,
        **QUERY_KEY_NORMS,
        **PROJECTED_EXPERTS,
        **SELECTION_BIAS,
        **dense_names("mlp.shared_experts"),
    },
    predicts_further=True,
    fused_in_peft=True,
)


def read_gpt_oss(options: Options, fields: Fields) -> Fields:
    biases = options.take("attention_bias", default=True)
    # What num_experts_per_tok and the rotary options say too.
    options.take("experts_per_token", default=None)
    options.take("initial_context_length", default=None)
    return {
        "head_dim": options.take("head_dim", default=64),
        "qkv_bias": biases,
        "attention_out_bias": biases,
        "attention_sinks": True,
        "num_experts": options.take("num_local_experts", "num_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("intermediate_size"),
        "activation": ClampedSwiGLU(
            float(options.take("swiglu_alpha", default=1.702)),
            float(options.take("swiglu_limit", default=7.0)),
        ),
        "router_bias": True,
        "expert_bias": True,
        **read_listed_windows(options, fields, 128, lambda layer: layer % 2 == 0),
        **read_rotary(options, default_base=150_000.0),
    }


def write_gpt_oss(config: ModelConfig) -> dict[str, Any]:
    activation = config.activation
    if not isinstance(activation, ClampedSwiGLU):
        activation = ClampedSwiGLU(1.702, 7.0)  # which reads back as another one
    return {
        "head_dim": config.head_dim,
        "attention_bias": config.qkv_bias,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "intermediate_size": config.d_expert,
        "swiglu_alpha": activation.alpha,
        "swiglu_limit": activation.limit,
        **write_listed_windows(config),
        **write_rotary(config),
    }


GPT_OSS_NAMES = {
    "attention.sinks": "self_attn.sinks",
    "attention.out_bias": "self_attn.o_proj.bias",
    "experts.router": "mlp.router.weight",
    "experts.router_bias": "mlp.router.bias",
    # Gate and up of a hidden unit are interleaved there.
    "experts.gate_up": Stored("mlp.experts.gate_up_proj", "expert, d_model, d_expert half"),
    "experts.gate_up_bias": Stored("mlp.experts.gate_up_proj_bias", "expert, d_expert half"),
    "experts.down": Stored("mlp.experts.down_proj", "expert, d_expert, d_model"),
    "experts.down_bias": Stored("mlp.experts.down_proj_bias", "expert, d_model"),
}
GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    read_gpt_oss,
    write_gpt_oss,
    {**QKV_BIASES, **GPT_OSS_NAMES},
)

LINEAR = "linear_attention"


def read_qwen3_next(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias", "use_sliding_window")
    # Of the convolutions too, after which nothing but silu stands here.
    options.require("hidden_act", "silu", default="silu")
    head_dim, layers = options.take("head_dim", default=256), range(fields["num_layers"])
    period = options.take("full_attention_interval", default=4)
    kinds = options.take("layer_types", default=None)
    default = [FULL if (layer + 1) % period == 0 else LINEAR for layer in layers]
    layer_types = default if kinds is None else kinds
    linear = tuple(
        layer for layer, kind in zip(layers, layer_types, strict=False) if kind == LINEAR
    )
    if len(layer_types) != len(layers) or set(layer_types) != {FULL, LINEAR}:
        raise options.unsupported(
            "layer_types", kinds, f"{FULL} or {LINEAR} for each layer, with at least one of both"
        )
    return {
        "head_dim": head_dim,
        "query_key_norm": "head",
        "attention_gate": True,
        "delta": GatedDeltaNet(
            layers=linear,
            num_key_heads=options.take("linear_num_key_heads", default=16),
            num_value_heads=options.take("linear_num_value_heads", default=32),
            key_head_dim=options.take("linear_key_head_dim", default=128),
            value_head_dim=options.take("linear_value_head_dim", default=128),
            conv_width=options.take("linear_conv_kernel_dim", default=4),
        ),
        **read_experts(options, normalises=True),
        "d_ff": options.take("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
        **read_dense_layers(options, fields),
        **read_rotary_dim(options, head_dim, default=0.25),
        **read_rotary(options, partial=True),
    }


def write_qwen3_next(config: ModelConfig) -> dict[str, Any]:
    delta = config.delta
    if delta is None:
        return {}
    return {
        "attention_bias": False,
        "head_dim": config.head_dim,
        "layer_types": [
            LINEAR if layer in delta.layers else FULL for layer in range(config.num_layers)
        ],
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_conv_kernel_dim": delta.conv_width,
        **write_experts(config),
        "shared_expert_intermediate_size": config.d_ff,
        **write_dense_layers(config),
        **write_rotary_dim(config),
        **write_rotary(config),
    }


QWEN3_NEXT_NAMES = {
    **PROJECTED_EXPERTS,
    **SHARED_EXPERT,
    **plus_one(
        {
            "attention.norm": "input_layernorm",
            "attention.query_norm": "self_attn.q_norm",
            "attention.key_norm": "self_attn.k_norm",
            "delta.norm": "input_layernorm",
            "norm": "post_attention_layernorm",
        }
    ),
    "delta.inward": "linear_attn.in_proj_qkvz.weight",
    "delta.strength_and_decay": "linear_attn.in_proj_ba.weight",
    "delta.filters": Stored("linear_attn.conv1d.weight", "delta_channel, , delta_width"),
    "delta.rate_bias": "linear_attn.dt_bias",
    "delta.log_rate": "linear_attn.A_log",
    "delta.read_norm": "linear_attn.norm.weight",
    "delta.out": "linear_attn.out_proj.weight",
}
QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    read_qwen3_next,
    write_qwen3_next,
    QWEN3_NEXT_NAMES,
    last_norm=Stored("model.norm.weight", offset=1.0),
    predicts_further=True,
    fused_in_peft=True,
)
