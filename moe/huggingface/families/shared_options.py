"""Options that multiple architectures share under the same names."""

from typing import Any

from moe.architecture.activation import Activation
from moe.config import ModelConfig
from moe.huggingface.families.family import Fields
from moe.huggingface.options import Options
from moe.huggingface.quantised import read_quantisation

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By their names in `transformers`."""


def common_fields(options: Options) -> Fields:
    """Fields that every architecture has under the same names."""
    read_quantisation(options)  # of the tensors, not of the network
    # Said by files that hold every option of the base class; no network here is made otherwise.
    require_no_biases(options, "is_encoder_decoder", "add_cross_attention")
    options.require("pruned_heads", None, {})
    num_heads, d_model = options.take("num_attention_heads"), options.take("hidden_size")
    num_kv_heads = options.take("num_key_value_heads", default=None)
    return {
        "vocab_size": options.take("vocab_size"),
        "num_layers": options.take("num_hidden_layers"),
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "norm_epsilon": options.take("rms_norm_eps"),
        "head": "tied" if options.take("tie_word_embeddings", default=False) else "untied",
        "activation": read_activation(options, "hidden_act", "silu"),
        "embedding_scale": 1.0,
        "num_experts": 0,
        "max_positions": options.take("max_position_embeddings", default=None),
    }


def common_options(config: ModelConfig) -> dict[str, Any]:
    """The options that `common_fields` reads."""
    return {
        "hidden_act": write_activation(config),
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


def read_activation(options: Options, name: str, default: str) -> Activation:
    """Activation of gate and up, from its name in `transformers`."""
    activation = options.take(name, default=default)
    if activation not in ACTIVATIONS:
        raise options.unsupported(name, activation, " or ".join(map(repr, ACTIVATIONS)))
    return ACTIVATIONS[activation]


def write_activation(config: ModelConfig) -> str:
    """The name that `read_activation` reads; of any other, which reads back as another one, the
    first."""
    names = [name for name, ours in ACTIVATIONS.items() if ours == config.activation]
    return (names or list(ACTIVATIONS))[0]


def head_dim_of(options: Options, fields: Fields) -> int:
    head_dim = options.take("head_dim", default=None)
    return fields["d_model"] // fields["num_heads"] if head_dim is None else head_dim


def require_no_biases(options: Options, *names: str) -> None:
    for name in names:
        options.require(name, False, default=False)


def read_dense_layers(options: Options, fields: Fields) -> Fields:
    """Qwen's dense layers among those with experts: supported where they come first."""
    options.require("decoder_sparse_step", 1, default=1)
    layers = options.take("mlp_only_layers", default=None) or []
    if sorted(layers) != list(range(len(layers))):
        raise options.unsupported("mlp_only_layers", layers, "dense layers only before all others")
    width = options.take("intermediate_size")
    return {"num_dense_layers": len(layers), "dense_d_ff": width if layers else 0}


def write_dense_layers(config: ModelConfig) -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.num_dense_layers)),
        "intermediate_size": config.dense_d_ff or config.d_expert,
    }


def read_groups(options: Options, groups: int, groups_per_token: int) -> int:
    """Experts that a token chooses among those of the `groups_per_token` best of its groups."""
    k = options.take("num_experts_per_tok")
    if groups > 1 and k != 2 * groups_per_token:
        # There a group is judged by its best two, here by its best k / chosen.
        raise options.unsupported(
            "num_experts_per_tok", k, f"2 x topk_group = {2 * groups_per_token}"
        )
    return k


def write_grouped_mixture(config: ModelConfig) -> dict[str, Any]:
    """Routed experts chosen in groups, shared ones beside them, dense layers first."""
    return {
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
    }
