"""What each architecture of `transformers` is in our terms: its options and its tensors' names.

An architecture is described in both directions. What a configuration cannot say in one of them is
found by writing it and reading it back.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe.config import LatentHeads, ModelConfig
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import read_rotary, written_rotary

Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One architecture.

    Args:
      architecture: its class in `transformers`.
      model_type: its name in config.json.
      read: fields of `ModelConfig` out of the options that are its own.
      written: the same options from a configuration.
      names: of the tensors of a layer that are its own, by the path of the weight in `Layer`.
    """

    architecture: str
    model_type: str
    read: Callable[[Options, Fields], Fields]
    written: Callable[[ModelConfig], dict[str, Any]]
    names: Mapping[str, str]


def common_fields(options: Options) -> Fields:
    """Fields that every architecture has under the same names."""
    options.demand("hidden_act", "silu", default="silu")
    options.demand("quantization_config", None)
    num_heads, d_model = options.take("num_attention_heads"), options.take("hidden_size")
    return {
        "vocab_size": options.take("vocab_size"),
        "num_layers": options.take("num_hidden_layers"),
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": options.take("num_key_value_heads", default=num_heads),
        "norm_epsilon": options.take("rms_norm_eps"),
        "head": "tied" if options.take("tie_word_embeddings", default=False) else "untied",
        "embedding_scale": 1.0,
        "num_experts": 0,
        "max_positions": options.take("max_position_embeddings", default=None),
    }


def common_options(config: ModelConfig) -> dict[str, Any]:
    """The options that `common_fields` reads."""
    return {
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.head == "tied",
        **(
            {}
            if config.max_positions is None
            else {"max_position_embeddings": config.max_positions}
        ),
    }


def _head_dim(options: Options, fields: Fields) -> int:
    given = options.take("head_dim", default=None)
    return fields["d_model"] // fields["num_heads"] if given is None else given


def _no_biases(options: Options, *names: str) -> None:
    for name in names:
        options.demand(name, False, default=False)


def _full_attention(options: Options) -> None:
    """Qwen's windows, which only some layers have: refused where they are in use."""
    options.demand("use_sliding_window", False, default=False)
    options.take("sliding_window", default=None)
    kinds = options.take("layer_types", default=None) or []
    if set(kinds) - {"full_attention"}:
        raise options.unsupported("layer_types", kinds, "full_attention in every layer")


def _dense_first(options: Options, fields: Fields) -> Fields:
    """Qwen's dense layers among those with experts: supported where they come first."""
    options.demand("decoder_sparse_step", 1, default=1)
    layers = options.take("mlp_only_layers", default=None) or []
    if sorted(layers) != list(range(len(layers))):
        raise options.unsupported("mlp_only_layers", layers, "dense layers before all others only")
    width = options.take("intermediate_size")
    return {"num_dense_layers": len(layers), "d_first": width if layers else 0}


def _written_dense_first(config: ModelConfig) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.num_dense_layers)),
        "intermediate_size": config.d_first or config.d_expert,
    }


def _read_llama(options: Options, fields: Fields) -> Fields:
    _no_biases(options, "attention_bias", "mlp_bias")
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": _head_dim(options, fields),
        **read_rotary(options),
    }


def _written_llama(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        **written_rotary(config),
    }


def _read_mistral(options: Options, fields: Fields) -> Fields:
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": _head_dim(options, fields),
        # What `transformers` takes where the file says nothing.
        "sliding_window": options.take("sliding_window", default=4096),
        **read_rotary(options),
    }


def _written_mistral(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_window,
        **written_rotary(config),
    }


def _read_qwen2(options: Options, fields: Fields) -> Fields:
    _full_attention(options)
    options.demand("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": fields["d_model"] // fields["num_heads"],
        "qkv_bias": True,
        **read_rotary(options),
    }


def _written_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "intermediate_size": config.d_ff,
        **written_rotary(config),
    }


def _read_qwen3(options: Options, fields: Fields) -> Fields:
    _full_attention(options)
    _no_biases(options, "attention_bias")
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": options.take("head_dim", default=128),
        "query_key_norm": "head",
        **read_rotary(options),
    }


def _written_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "attention_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        **written_rotary(config),
    }


def _read_mixtral(options: Options, fields: Fields) -> Fields:
    return {
        "head_dim": _head_dim(options, fields),
        "num_experts": options.take("num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("intermediate_size"),
        "sliding_window": options.take("sliding_window", default=None),
        **read_rotary(options, default_base=1e6),
    }


def _written_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_dim,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "intermediate_size": config.d_expert,
        "sliding_window": config.sliding_window,
        **written_rotary(config),
    }


def _read_qwen2_moe(options: Options, fields: Fields) -> Fields:
    _full_attention(options)
    options.demand("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "head_dim": fields["d_model"] // fields["num_heads"],
        "qkv_bias": options.take("qkv_bias", default=True),
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("moe_intermediate_size"),
        "d_ff": options.take("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
        "renormalise": options.take("norm_topk_prob", default=False),
        **_dense_first(options, fields),
        **read_rotary(options),
    }


def _written_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "qkv_bias": config.qkv_bias,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "shared_expert_intermediate_size": config.d_ff,
        "norm_topk_prob": config.renormalise,
        **_written_dense_first(config),
        **written_rotary(config),
    }


def _read_qwen3_moe(options: Options, fields: Fields) -> Fields:
    _full_attention(options)
    _no_biases(options, "attention_bias")
    return {
        "head_dim": _head_dim(options, fields),
        "query_key_norm": "head",
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("moe_intermediate_size"),
        "renormalise": options.take("norm_topk_prob", default=False),
        **_dense_first(options, fields),
        **read_rotary(options),
    }


def _written_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": False,
        "attention_bias": False,
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "norm_topk_prob": config.renormalise,
        **_written_dense_first(config),
        **written_rotary(config),
    }


def _read_olmoe(options: Options, fields: Fields) -> Fields:
    _no_biases(options, "attention_bias")
    options.demand("clip_qkv", None)
    options.demand("head_dim", None, fields["d_model"] // fields["num_heads"])
    return {
        "head_dim": fields["d_model"] // fields["num_heads"],
        "query_key_norm": "projection",
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("intermediate_size"),
        "renormalise": options.take("norm_topk_prob", default=False),
        **read_rotary(options),
    }


def _written_olmoe(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "intermediate_size": config.d_expert,
        "norm_topk_prob": config.renormalise,
        **written_rotary(config),
    }


def _read_deepseek(options: Options, fields: Fields) -> Fields:
    _no_biases(options, "attention_bias")
    options.demand("scoring_func", "sigmoid", default="sigmoid")
    options.demand("topk_method", "noaux_tc", default="noaux_tc")
    options.demand("moe_layer_freq", 1, default=1)
    options.take("head_dim", default=None)  # of the rotated part, as the next but two
    d_expert = options.take("moe_intermediate_size")
    rope_dim = options.take("qk_rope_head_dim")
    groups, kept = options.take("n_group"), options.take("topk_group")
    k = options.take("num_experts_per_tok")
    if groups > 1 and k != 2 * kept:
        # There a group is judged by its best two, here by its best k / kept.
        raise options.unsupported("num_experts_per_tok", k, f"2 x topk_group = {2 * kept}")
    first = options.take("first_k_dense_replace", default=0)
    width = options.take("intermediate_size")
    return {
        "head_dim": options.take("qk_nope_head_dim") + rope_dim,
        "latent": LatentHeads(
            rank=options.take("kv_lora_rank"),
            query_rank=options.take("q_lora_rank"),
            rope_dim=rope_dim,
            value_dim=options.take("v_head_dim"),
        ),
        "rope_interleaved": options.take("rope_interleave", default=True),
        "num_experts": options.take("n_routed_experts", "num_local_experts"),
        "experts_per_token": k,
        "d_expert": d_expert,
        "d_ff": options.take("n_shared_experts") * d_expert,
        "num_dense_layers": first,
        "d_first": width if first else 0,
        "router_scores": "sigmoid",
        "selection_bias": True,
        "renormalise": options.take("norm_topk_prob"),
        "routed_scaling": options.take("routed_scaling_factor"),
        "num_expert_groups": groups,
        "expert_groups_per_token": kept,
        **read_rotary(options, temperatures=True),
    }


def _written_deepseek(config: ModelConfig) -> dict[str, Any]:
    latent = config.latent
    if latent is None:
        return {}
    return {
        "attention_bias": False,
        "qk_nope_head_dim": config.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "rope_interleave": config.rope_interleaved,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "n_shared_experts": config.d_ff // max(config.d_expert, 1),
        "first_k_dense_replace": config.num_dense_layers,
        "intermediate_size": config.d_first or config.d_expert,
        "num_nextn_predict_layers": 0,
        "norm_topk_prob": config.renormalise,
        "routed_scaling_factor": config.routed_scaling,
        "n_group": config.num_expert_groups,
        "topk_group": config.expert_groups_per_token,
        **written_rotary(config),
    }


def _experts(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    named = {"experts.gate": gate, "experts.up": up, "experts.down": down}
    weights = {path: f"{prefix}.experts.{{expert}}.{name}.weight" for path, name in named.items()}
    return {"experts.router": f"{prefix}.gate.weight", **weights}


def _dense(prefix: str) -> dict[str, str]:
    return {f"dense.{name}": f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down")}


_PROJECTED_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_NORMS = {
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
}
_BIASES = {
    "attention.query_bias": "self_attn.q_proj.bias",
    "attention.key_bias": "self_attn.k_proj.bias",
    "attention.value_bias": "self_attn.v_proj.bias",
}
COMMON_NAMES = {
    "attention.norm": "input_layernorm.weight",
    "attention.query": "self_attn.q_proj.weight",
    "attention.key": "self_attn.k_proj.weight",
    "attention.value": "self_attn.v_proj.weight",
    "attention.out": "self_attn.o_proj.weight",
    "norm": "post_attention_layernorm.weight",
    **_dense("mlp"),
}
"""Tensors of a layer that most architectures name alike."""
_LATENT = {
    "attention.query_down": "self_attn.q_a_proj.weight",
    "attention.query_norm": "self_attn.q_a_layernorm.weight",
    "attention.query": "self_attn.q_b_proj.weight",
    "attention.down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.down_norm": "self_attn.kv_a_layernorm.weight",
    "attention.up": "self_attn.kv_b_proj.weight",
    "experts.bias": "mlp.gate.e_score_correction_bias",
}

FAMILIES = (
    Family("LlamaForCausalLM", "llama", _read_llama, _written_llama, {}),
    Family("MistralForCausalLM", "mistral", _read_mistral, _written_mistral, {}),
    Family("Qwen2ForCausalLM", "qwen2", _read_qwen2, _written_qwen2, _BIASES),
    Family("Qwen3ForCausalLM", "qwen3", _read_qwen3, _written_qwen3, _NORMS),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        _read_mixtral,
        _written_mixtral,
        _experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _read_qwen2_moe,
        _written_qwen2_moe,
        {
            **_BIASES,
            **_PROJECTED_EXPERTS,
            **_dense("mlp.shared_expert"),
            "shared_gate": "mlp.shared_expert_gate.weight",
        },
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _read_qwen3_moe,
        _written_qwen3_moe,
        {**_NORMS, **_PROJECTED_EXPERTS},
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        _read_olmoe,
        _written_olmoe,
        {**_NORMS, **_PROJECTED_EXPERTS},
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _read_deepseek,
        _written_deepseek,
        {**_LATENT, **_PROJECTED_EXPERTS, **_dense("mlp.shared_experts")},
    ),
)
"""All that are supported. A network that several can express is written as the first of them."""
