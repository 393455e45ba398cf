"""Options of DeepSeek-V3: latent attention, grouped sigmoid routing, dense first layers."""

from typing import Any

from moe.config import ModelConfig, MultiHeadLatentAttention
from moe.huggingface.families.family import Fields
from moe.huggingface.families.shared_options import (
    read_groups,
    require_no_biases,
    write_grouped_mixture,
)
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import read_rotary, write_rotary


def read_deepseek(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    options.require("scoring_func", "sigmoid", default="sigmoid")
    options.require("topk_method", "noaux_tc", default="noaux_tc")
    options.require("moe_layer_freq", 1, default=1)
    options.take("head_dim", default=None)  # of the rotated part, as the next but two
    d_expert = options.take("moe_intermediate_size")
    qk_rope_head_dim = options.take("qk_rope_head_dim")
    groups, topk = options.take("n_group"), options.take("topk_group")
    k = read_groups(options, groups, topk)
    first = options.take("first_k_dense_replace", default=3)
    width = options.take("intermediate_size")
    return {
        "head_dim": options.take("qk_nope_head_dim") + qk_rope_head_dim,
        "mla": MultiHeadLatentAttention(
            kv_lora_rank=options.take("kv_lora_rank"),
            q_lora_rank=options.take("q_lora_rank"),
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=options.take("v_head_dim"),
        ),
        "rope_interleaved": options.take("rope_interleave", default=True),
        "num_experts": options.take("n_routed_experts", "num_local_experts"),
        "experts_per_token": k,
        "d_expert": d_expert,
        "d_ff": options.take("n_shared_experts") * d_expert,
        "num_dense_layers": first,
        "dense_d_ff": width if first else 0,
        "router_scores": "sigmoid",
        "selection_bias": True,
        "renormalise": options.take("norm_topk_prob"),
        "routed_scaling": options.take("routed_scaling_factor"),
        "num_expert_groups": groups,
        "expert_groups_per_token": topk,
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
        **write_grouped_mixture(config),
        **write_rotary(config),
    }
