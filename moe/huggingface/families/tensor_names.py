"""Names of a layer's tensors by the path of the weight in `Layer`, with gate and up separate."""


def expert_names(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    named = {"experts.gate": gate, "experts.up": up, "experts.down": down}
    weights = {path: f"{prefix}.experts.{{expert}}.{name}.weight" for path, name in named.items()}
    return {"experts.router": f"{prefix}.gate.weight", **weights}


def dense_names(prefix: str) -> dict[str, str]:
    return {f"dense.{name}": f"{prefix}.{name}_proj.weight" for name in ("gate", "up", "down")}


PROJECTED_EXPERTS = expert_names("mlp", "gate_proj", "up_proj", "down_proj")
QUERY_KEY_NORMS = {
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
}
QKV_BIASES = {
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
    **dense_names("mlp"),
}
"""Tensors of a layer that most architectures name alike."""
NORMS_AFTER = {
    "attention.norm": "post_attention_layernorm.weight",
    "norm": "post_feedforward_layernorm.weight",
}
SELECTION_BIAS = {"experts.bias": "mlp.gate.e_score_correction_bias"}
LATENT_ATTENTION = {
    "attention.query_down": "self_attn.q_a_proj.weight",
    "attention.query_norm": "self_attn.q_a_layernorm.weight",
    "attention.query": "self_attn.q_b_proj.weight",
    "attention.down": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.down_norm": "self_attn.kv_a_layernorm.weight",
    "attention.up": "self_attn.kv_b_proj.weight",
    **SELECTION_BIAS,
}
