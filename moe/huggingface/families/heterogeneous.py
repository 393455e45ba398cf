"""Options of architectures with heterogeneous layers: OLMo 3, SmolLM3, Qwen3-Next."""

from typing import Any

from moe.config import GatedDeltaNet, ModelConfig
from moe.huggingface.families.family import Fields, Stored
from moe.huggingface.families.shared_options import (
    head_dim_of,
    read_dense_layers,
    require_no_biases,
    write_dense_layers,
)
from moe.huggingface.families.tensor_names import PROJECTED_EXPERTS, dense_names
from moe.huggingface.families.windows import FULL, read_listed_windows, write_listed_windows
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import (
    read_rotary,
    read_rotary_by_window,
    read_rotary_dim,
    write_rotary,
    write_rotary_by_window,
    write_rotary_dim,
)

LINEAR = "linear_attention"
NEXT_LAST_NORM = Stored("model.norm.weight", offset=1.0)
QWEN3_NEXT_NAMES = {
    **PROJECTED_EXPERTS,
    **dense_names("mlp.shared_expert"),
    "shared_gate": "mlp.shared_expert_gate.weight",
    **{
        path: Stored(f"{name}.weight", offset=1.0)
        for path, name in {
            "attention.norm": "input_layernorm",
            "attention.query_norm": "self_attn.q_norm",
            "attention.key_norm": "self_attn.k_norm",
            "delta.norm": "input_layernorm",
            "norm": "post_attention_layernorm",
        }.items()
    },
    "delta.inward": "linear_attn.in_proj_qkvz.weight",
    "delta.strength_and_decay": "linear_attn.in_proj_ba.weight",
    "delta.filters": Stored("linear_attn.conv1d.weight", "delta_channel, , delta_width"),
    "delta.rate_bias": "linear_attn.dt_bias",
    "delta.log_rate": "linear_attn.A_log",
    "delta.read_norm": "linear_attn.norm.weight",
    "delta.out": "linear_attn.out_proj.weight",
}


def read_olmo3(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias")
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        "norm_placement": "after",
        "query_key_norm": "projection",
        # Three of four layers where the file lists none.
        **read_listed_windows(options, fields, 4096, lambda layer: (layer + 1) % 4 != 0),
        **read_rotary_by_window(options, 500_000.0),
    }


def write_olmo3(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        **write_listed_windows(config),
        **write_rotary_by_window(config),
    }


def read_smollm3(options: Options, fields: Fields) -> Fields:
    require_no_biases(options, "attention_bias", "mlp_bias")
    layers = range(fields["num_layers"])
    interval = options.take("no_rope_layer_interval", default=4)
    listed = options.take("no_rope_layers", default=None)
    # 1 is a layer that rotates.
    rotates = [(layer + 1) % interval != 0 for layer in layers] if listed is None else listed
    if len(rotates) < len(layers) or any(flag not in (0, 1) for flag in rotates):
        raise options.unsupported("no_rope_layers", listed, "1 or 0 for each layer")
    nope_layers = tuple(layer for layer in layers if not rotates[layer])
    # Without the first option the file may still name a window, which nothing has.
    slides = options.take("use_sliding_window", default=False)
    windows = read_listed_windows(
        options, fields, None, lambda layer: slides and layer in nope_layers
    )
    if windows and not slides:
        raise options.unsupported(
            "layer_types", options.values["layer_types"], "windows with use_sliding_window=true"
        )
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        "head": "tied" if options.take("tie_word_embeddings", default=True) else "untied",
        "nope_layers": nope_layers,
        **windows,
        **read_rotary(options, default_base=2e6),
    }


def write_smollm3(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        "no_rope_layers": [
            int(layer not in config.nope_layers) for layer in range(config.num_layers)
        ],
        "use_sliding_window": config.sliding_window is not None,
        **write_listed_windows(config),
        **write_rotary(config),
    }


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
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take("moe_intermediate_size"),
        "d_ff": options.take("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
        "renormalise": options.take("norm_topk_prob", default=True),
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
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.d_expert,
        "shared_expert_intermediate_size": config.d_ff,
        "norm_topk_prob": config.renormalise,
        **write_dense_layers(config),
        **write_rotary_dim(config),
        **write_rotary(config),
    }
