"""Networks that programs are compiled for: fields of `moe.config.ModelConfig`."""

from dataclasses import fields
from typing import Any

MIXTRAL_8X22B: dict[str, Any] = {
    "vocab_size": 32768,
    "num_layers": 56,
    "d_model": 6144,
    "num_heads": 48,
    "num_kv_heads": 8,
    "head_dim": 128,
    "num_experts": 8,
    "experts_per_token": 2,
    "d_expert": 16384,
    "rope_base": 1000000.0,
}
QWEN3_235B: dict[str, Any] = {
    "vocab_size": 151936,
    "num_layers": 94,
    "d_model": 4096,
    "num_heads": 64,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "experts_per_token": 8,
    "d_expert": 1536,
    "query_key_norm": "head",
    "rope_base": 1000000.0,
}
DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "num_layers": 61,
    "num_dense_layers": 3,
    "d_model": 7168,
    "num_heads": 128,
    "num_kv_heads": 128,
    "head_dim": 192,
    "mla": {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "num_experts": 256,
    "experts_per_token": 8,
    "d_expert": 2048,
    "d_ff": 2048,
    "dense_d_ff": 18432,
    "router_scores": "sigmoid",
    "selection_bias": True,
    "num_expert_groups": 8,
    "expert_groups_per_token": 4,
    "routed_scaling": 2.5,
    "rope_interleaved": True,
}
"""Their config.json on Hugging Face, without layers that predict further tokens."""


def network(sizes: dict[str, Any], **execution: Any) -> Any:
    """The network of these sizes in bfloat16, computed so."""
    from moe.architecture.attention import MultiHeadLatentAttention
    from moe.config import ModelConfig
    from moe.execution import Execution

    given = dict(sizes)
    if (latent := given.get("mla")) is not None:
        given["mla"] = MultiHeadLatentAttention(**latent)
    assert given.keys() <= {field.name for field in fields(ModelConfig)}
    return ModelConfig(**given, dtype="bfloat16", execution=Execution(**execution))
