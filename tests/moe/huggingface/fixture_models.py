"""The small networks that `make_fixtures.py` makes checkpoints of, as `transformers` takes them."""

SIZES = {
    "vocab_size": 37,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 28,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Where heads have no width of their own it is hidden_size / num_attention_heads, and even.
NARROW = {**SIZES, "hidden_size": 24}
# Short contexts and wavelengths, so that a few tokens lie on both sides of every border.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": ("Llama", {**SIZES, "head_dim": 12, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**SIZES, "head_dim": 6, "sliding_window": 5}),
    "qwen2": ("Qwen2", {**NARROW, "rope_parameters": YARN}),
    "qwen3": (
        "Qwen3",
        {
            **SIZES,
            "head_dim": 6,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 1,
        },
    ),
    "mixtral": (
        "Mixtral",
        {
            **SIZES,
            "head_dim": 6,
            "intermediate_size": 10,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **NARROW,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 14,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **SIZES,
            "head_dim": 6,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "Olmoe",
        {**NARROW, "intermediate_size": 10, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 9,
            "kv_lora_rank": 11,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 5,
            "v_head_dim": 7,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    # Queries straight from the stream, as in the small models of the family.
    "deepseek_v3_direct": (
        "DeepseekV3",
        {
            **SIZES,
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "kv_lora_rank": 11,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 7,
            "norm_topk_prob": False,
        },
    ),
}
MODELS["olmo3"] = (
    "Olmo3",
    {
        **SIZES,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {**YARN, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
)
MODELS["smollm3"] = (
    "SmolLM3",
    {
        **NARROW,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "rope_parameters": {**YARN, "attention_factor": 1.3},
    },
)
MODELS["glm4_moe"] = (
    "Glm4Moe",
    {
        **SIZES,
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
    },
)
MODELS["gpt_oss"] = (
    "GptOss",
    {
        **SIZES,
        "head_dim": 6,
        "num_key_value_heads": 2,
        "sliding_window": 3,
        "intermediate_size": 10,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "swiglu_alpha": 1.6,
        # Of scores as here, some are cut.
        "swiglu_limit": 0.9,
        "rope_parameters": {**YARN, "truncate": False},
    },
)
MODELS["gemma3"] = (
    "Gemma3",
    {
        **SIZES,
        "num_hidden_layers": 3,
        "head_dim": 6,
        "query_pre_attn_scalar": 10,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
)
# Of three layers with Gated DeltaNet one before and one after that with attention.
MODELS["qwen3_next"] = (
    "Qwen3Next",
    {
        **SIZES,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 50.0,
            "partial_rotary_factor": 0.5,
        },
    },
)
# As Kimi-K2 comes: the network of DeepSeek-V3 under another name, of one group, its wavelengths
# stretched from one border on.
MODELS["kimi_k2"] = (
    "DeepseekV3",
    {
        **SIZES,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 9,
        "kv_lora_rank": 11,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 5,
        "v_head_dim": 7,
        "routed_scaling_factor": 2.8,
        "rope_parameters": {
            **YARN,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)
CALLED = {"kimi_k2": "kimi_k2"}
"""Model types that are not those `transformers` writes."""
WITH_CHOICES = ("glm4_moe", "gpt_oss", "qwen3_next")
IN_BFLOAT16 = ("mistral",)
IN_TWO_FILES = ("mixtral", "deepseek_v3")
