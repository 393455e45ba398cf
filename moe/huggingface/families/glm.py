"""Options of GLM-4.5 and 4.6: partial rotation, sigmoid routing, a shared expert, dense first
layers."""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.families.family import Fields
from moe.huggingface.families.shared_options import (
    head_dim_of,
    read_groups,
    write_grouped_mixture,
)
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import (
    read_rotary,
    read_rotary_dim,
    write_rotary,
    write_rotary_dim,
)


def read_glm4_moe(options: Options, fields: Fields) -> Fields:
    head_dim, d_expert = head_dim_of(options, fields), options.take("moe_intermediate_size")
    groups, topk = options.take("n_group", default=1), options.take("topk_group", default=1)
    k = read_groups(options, groups, topk)
    first = options.take("first_k_dense_replace", default=1)
    width = options.take("intermediate_size")
    return {
        "head_dim": head_dim,
        "qkv_bias": options.take("attention_bias", default=False),
        "query_key_norm": "head" if options.take("use_qk_norm", default=False) else None,
        "num_experts": options.take("n_routed_experts", "num_local_experts"),
        "experts_per_token": k,
        "d_expert": d_expert,
        "d_ff": options.take("n_shared_experts", default=1) * d_expert,
        "num_dense_layers": first,
        "dense_d_ff": width if first else 0,
        "router_scores": "sigmoid",
        "selection_bias": True,
        "renormalise": options.take("norm_topk_prob", default=True),
        "routed_scaling": options.take("routed_scaling_factor", default=1.0),
        "num_expert_groups": groups,
        "expert_groups_per_token": topk,
        **read_rotary_dim(options, head_dim, default=0.5),
        **read_rotary(options, partial=True),
    }


def write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_dim,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.query_key_norm is not None,
        **write_grouped_mixture(config),
        **write_rotary_dim(config),
        **write_rotary(config),
    }
