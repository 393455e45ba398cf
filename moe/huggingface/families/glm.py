"""Options of GLM-4.5 and 4.6: partial rotation, sigmoid routing, a shared expert, dense first
layers."""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.families.family import Fields
from moe.huggingface.families.shared_options import head_dim_of
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import (
    read_rotary,
    read_rotary_dim,
    written_rotary,
    written_rotary_dim,
)


def read_glm4_moe(options: Options, fields: Fields) -> Fields:
    head_dim, d_expert = head_dim_of(options, fields), options.take("moe_intermediate_size")
    groups, topk = options.take("n_group", default=1), options.take("topk_group", default=1)
    k = options.take("num_experts_per_tok")
    if groups > 1 and k != 2 * topk:
        # There a group is judged by its best two, here by its best k / topk_group.
        raise options.unsupported("num_experts_per_tok", k, f"2 x topk_group = {2 * topk}")
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


def written_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_dim,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.query_key_norm is not None,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "n_shared_experts": config.d_ff // max(config.d_expert, 1),
        "first_k_dense_replace": config.num_dense_layers,
        "intermediate_size": config.dense_d_ff or config.d_expert,
        "num_nextn_predict_layers": 0,
        "norm_topk_prob": config.renormalise,
        "routed_scaling_factor": config.routed_scaling,
        "n_group": config.num_expert_groups,
        "topk_group": config.expert_groups_per_token,
        **written_rotary_dim(config),
        **written_rotary(config),
    }
