"""Architectures with experts.

They are Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4.5, gpt-oss and Qwen3-Next.
"""

from typing import Any

from moe.architecture.feed_forward import ClampedSwiGLU
from moe.config import GatedDeltaNet, ModelConfig, MultiHeadLatentAttention
from moe.huggingface.family import (
    LATENT_ATTENTION,
    PROJECTED_EXPERTS,
    QKV_BIASES,
    QUERY_KEY_NORMS,
    SELECTION_BIAS,
    Family,
    Fields,
    OptionGroup,
    Stored,
    dense_names,
    expert_names,
    plus_one,
)
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import rotary, rotary_dim
from moe.huggingface.shared_options import (
    DENSE_LAYERS,
    DERIVED_HEAD_DIM,
    FULL,
    HEAD_DIM,
    NO_ATTENTION_BIAS,
    experts,
    fixed,
    grouped_experts,
    ignored,
    listed_windows,
    option,
    required,
    slides_alternately,
    windows,
)

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    (
        HEAD_DIM,
        option("num_experts", "num_local_experts"),
        option("experts_per_token", "num_experts_per_tok"),
        option("d_expert", "intermediate_size"),
        option("sliding_window", default=None),
        rotary(default_base=1e6),
    ),
    expert_names("block_sparse_moe", "w1", "w3", "w2"),
)

SHARED_EXPERT = {
    **dense_names("mlp.shared_expert"),
    "shared_gate": "mlp.shared_expert_gate.weight",
}
GATED_SHARED_EXPERT = (
    option("d_ff", "shared_expert_intermediate_size"),
    fixed(shared_expert_gate=True),
)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    (
        windows(slides_alternately),
        DERIVED_HEAD_DIM,
        option("qkv_bias", default=True),
        *experts(normalises=False),
        *GATED_SHARED_EXPERT,
        DENSE_LAYERS,
        rotary(),
    ),
    {**QKV_BIASES, **PROJECTED_EXPERTS, **SHARED_EXPERT},
)

QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    (
        windows(None),
        NO_ATTENTION_BIAS,
        # What Qwen3-Coder says of what every Qwen3-MoE is.
        required("qkv_bias", written=False),
        required("use_qk_norm", True, written=False),
        required("shared_expert_intermediate_size", 0, None, written=False),
        HEAD_DIM,
        fixed(query_key_norm="head"),
        *experts(normalises=False),
        DENSE_LAYERS,
        rotary(),
    ),
    {**QUERY_KEY_NORMS, **PROJECTED_EXPERTS},
    fused_in_peft=True,
)
OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    (
        NO_ATTENTION_BIAS,
        required("clip_qkv", None),
        DERIVED_HEAD_DIM,
        fixed(query_key_norm="projection"),
        *experts(normalises=False, width="intermediate_size"),
        rotary(),
    ),
    {**QUERY_KEY_NORMS, **PROJECTED_EXPERTS},
    defaults={"rms_norm_eps": 1e-5},  # which the files of 2024 do not have
)


MLA_OPTIONS = ("v_head_dim", "kv_lora_rank", "q_lora_rank")
"""Options of the names that fields of `MultiHeadLatentAttention` have."""


def read_latent_attention(options: Options, fields: Fields) -> Fields:
    """DeepSeek's latent attention."""
    rotated = options.take("qk_rope_head_dim")
    head_dim = options.take("qk_nope_head_dim") + rotated
    stated = {name: options.take(name) for name in MLA_OPTIONS}
    return {
        "head_dim": head_dim,
        "mla": MultiHeadLatentAttention(qk_rope_head_dim=rotated, **stated),
    }


def write_latent_attention(config: ModelConfig) -> dict[str, Any] | None:
    """The options that `read_latent_attention` reads."""
    mla = config.mla
    return mla and {
        "qk_nope_head_dim": config.head_dim - mla.qk_rope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        **{name: getattr(mla, name) for name in MLA_OPTIONS},
    }


DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    (
        NO_ATTENTION_BIAS,
        required("scoring_func", "sigmoid", written=False),
        required("topk_method", "noaux_tc", written=False),
        required("moe_layer_freq", 1, written=False),
        ignored("head_dim"),  # of the rotated part, as qk_rope_head_dim
        OptionGroup(read_latent_attention, write_latent_attention),
        option("rope_interleaved", "rope_interleave", default=True),
        *grouped_experts(first_k_dense_replace=3),
        rotary(temperatures=True),
    ),
    {**LATENT_ATTENTION, **PROJECTED_EXPERTS, **dense_names("mlp.shared_experts")},
    also=("kimi_k2",),
    predicts_further=True,
    fused_in_peft=True,
)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    (
        HEAD_DIM,
        option("qkv_bias", "attention_bias", default=False),
        OptionGroup(
            lambda options, fields: {
                "query_key_norm": "head" if options.take("use_qk_norm", default=False) else None
            },
            lambda config: {"use_qk_norm": config.query_key_norm is not None},
        ),
        *grouped_experts(
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            n_shared_experts=1,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        rotary_dim(default=0.5),
        rotary(partial=True),
    ),
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


def read_clamped_swiglu(options: Options, fields: Fields) -> Fields:
    """The activation of gpt-oss."""
    alpha = float(options.take("swiglu_alpha", default=1.702))
    return {"activation": ClampedSwiGLU(alpha, float(options.take("swiglu_limit", default=7.0)))}


def write_clamped_swiglu(config: ModelConfig) -> dict[str, Any]:
    """The options that `read_clamped_swiglu` reads."""
    activation = config.activation
    if not isinstance(activation, ClampedSwiGLU):
        activation = ClampedSwiGLU(1.702, 7.0)  # which reads back as another one
    return {"swiglu_alpha": activation.alpha, "swiglu_limit": activation.limit}


def read_biases(options: Options, fields: Fields) -> Fields:
    """Biases of all projections of attention, or of none."""
    biases = options.take("attention_bias", default=True)
    return {"qkv_bias": biases, "attention_out_bias": biases}


GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What `transformers` takes where the file says nothing."""
GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    (
        # What num_experts_per_tok and the rotary options say too.
        ignored("experts_per_token", "initial_context_length"),
        option("head_dim", default=64),
        OptionGroup(read_biases, lambda config: {"attention_bias": config.qkv_bias}),
        option("num_experts", "num_local_experts", "num_experts"),
        option("experts_per_token", "num_experts_per_tok"),
        option("d_expert", "intermediate_size"),
        fixed(attention_sinks=True, router_bias=True, expert_bias=True),
        OptionGroup(read_clamped_swiglu, write_clamped_swiglu),
        listed_windows(128, lambda layer: layer % 2 == 0),
        rotary(default_base=150_000.0),
    ),
    {
        **QKV_BIASES,
        "attention.sinks": "self_attn.sinks",
        "attention.out_bias": "self_attn.o_proj.bias",
        "experts.router": "mlp.router.weight",
        "experts.router_bias": "mlp.router.bias",
        # Gate and up of a hidden unit are interleaved there.
        "experts.gate_up": Stored("mlp.experts.gate_up_proj", "expert, d_model, d_expert half"),
        "experts.gate_up_bias": Stored("mlp.experts.gate_up_proj_bias", "expert, d_expert half"),
        "experts.down": Stored("mlp.experts.down_proj", "expert, d_expert, d_model"),
        "experts.down_bias": Stored("mlp.experts.down_proj_bias", "expert, d_model"),
    },
    defaults={"rope_scaling": GPT_OSS_SCALING},
)

LINEAR = "linear_attention"
DELTA_OPTIONS = {
    "num_key_heads": ("linear_num_key_heads", 16),
    "num_value_heads": ("linear_num_value_heads", 32),
    "key_head_dim": ("linear_key_head_dim", 128),
    "value_head_dim": ("linear_value_head_dim", 128),
    "conv_width": ("linear_conv_kernel_dim", 4),
}
"""Option and its default by the field of `GatedDeltaNet`."""


def read_delta(options: Options, fields: Fields) -> Fields:
    """Layers of Qwen3-Next with Gated DeltaNet in place of attention."""
    layers = range(fields["num_layers"])
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
    sizes = {
        field: options.take(name, default=default)
        for field, (name, default) in DELTA_OPTIONS.items()
    }
    return {"delta": GatedDeltaNet(layers=linear, **sizes)}


def write_delta(config: ModelConfig) -> dict[str, Any] | None:
    """The options that `read_delta` reads."""
    delta = config.delta
    return delta and {
        "layer_types": [
            LINEAR if layer in delta.layers else FULL for layer in range(config.num_layers)
        ],
        **{name: getattr(delta, field) for field, (name, _) in DELTA_OPTIONS.items()},
    }


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    (
        NO_ATTENTION_BIAS,
        required("use_sliding_window", written=False),
        # The activation after the convolutions too, which is always silu here.
        required("hidden_act", "silu", written=False),
        option("head_dim", default=256),
        fixed(query_key_norm="head", attention_gate=True),
        OptionGroup(read_delta, write_delta),
        *experts(normalises=True),
        *GATED_SHARED_EXPERT,
        DENSE_LAYERS,
        rotary_dim(default=0.25),
        rotary(partial=True),
    ),
    {
        **PROJECTED_EXPERTS,
        **SHARED_EXPERT,
        **plus_one(
            {
                **QUERY_KEY_NORMS,
                "attention.norm": "input_layernorm.weight",
                "delta.norm": "input_layernorm.weight",
                "norm": "post_attention_layernorm.weight",
            }
        ),
        "delta.inward": "linear_attn.in_proj_qkvz.weight",
        "delta.strength_and_decay": "linear_attn.in_proj_ba.weight",
        "delta.filters": Stored("linear_attn.conv1d.weight", "delta_channel, , delta_width"),
        "delta.rate_bias": "linear_attn.dt_bias",
        "delta.log_rate": "linear_attn.A_log",
        "delta.read_norm": "linear_attn.norm.weight",
        "delta.out": "linear_attn.out_proj.weight",
    },
    last_norm=Stored("model.norm.weight", offset=1.0),
    predicts_further=True,
    fused_in_peft=True,
)
