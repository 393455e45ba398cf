"""Options of gpt-oss: attention sinks, windows in every other layer, biases, clamped SwiGLU."""

from typing import Any

from moe.architecture.activation import ClampedSwiGLU
from moe.config import ModelConfig
from moe.huggingface.families.family import Fields, Stored
from moe.huggingface.families.windows import read_listed_windows, write_listed_windows
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import read_rotary, write_rotary

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
GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What `transformers` takes where the file says nothing."""


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
