"""Options that multiple architectures share under the same names."""

from collections.abc import Callable, Mapping
from typing import Any

from moe.architecture.activation import Activation
from moe.config import ModelConfig
from moe.huggingface.family import Fields
from moe.huggingface.options import Options
from moe.huggingface.quantised import read_quantisation

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By their names in `transformers`."""


def common_fields(options: Options) -> Fields:
    """Fields that every architecture has under the same names."""
    read_quantisation(options)  # of the tensors, not of the network
    num_heads, d_model = options.take("num_attention_heads"), options.take("hidden_size")
    return {
        "vocab_size": options.take("vocab_size"),
        "num_layers": options.take("num_hidden_layers"),
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": options.take("num_key_value_heads", default=num_heads),
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


def read_experts(
    options: Options, normalises: bool, width: str = "moe_intermediate_size"
) -> Fields:
    """Routed experts of Qwen and OLMoE.

    Args:
      normalises: the default of ``norm_topk_prob``.
      width: the option of an expert's width.
    """
    return {
        "num_experts": options.take("num_experts", "num_local_experts"),
        "experts_per_token": options.take("num_experts_per_tok"),
        "d_expert": options.take(width),
        "renormalise": options.take("norm_topk_prob", default=normalises),
    }


def write_experts(config: ModelConfig, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """The options that `read_experts` reads."""
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        width: config.d_expert,
        "norm_topk_prob": config.renormalise,
    }


def read_grouped_experts(options: Options, defaults: Mapping[str, Any]) -> Fields:
    """Routed experts chosen in groups by sigmoids, shared ones beside them, dense layers first.

    Args:
      defaults: of options that a file may lack.
    """

    def take(name: str, *others: str) -> Any:
        return options.take(
            name, *others, **({"default": defaults[name]} if name in defaults else {})
        )

    d_expert = take("moe_intermediate_size")
    groups, groups_per_token = take("n_group"), take("topk_group")
    k = take("num_experts_per_tok")
    if groups > 1 and k != 2 * groups_per_token:
        # There a group is judged by its best two, here by its best k / groups_per_token.
        raise options.unsupported(
            "num_experts_per_tok", k, f"2 x topk_group = {2 * groups_per_token}"
        )
    first, width = take("first_k_dense_replace"), take("intermediate_size")
    return {
        "num_experts": take("n_routed_experts", "num_local_experts"),
        "experts_per_token": k,
        "d_expert": d_expert,
        "d_ff": take("n_shared_experts") * d_expert,
        "num_dense_layers": first,
        "dense_d_ff": width if first else 0,
        "router_scores": "sigmoid",
        "selection_bias": True,
        "renormalise": take("norm_topk_prob"),
        "routed_scaling": take("routed_scaling_factor"),
        "num_expert_groups": groups,
        "expert_groups_per_token": groups_per_token,
    }


def write_grouped_experts(config: ModelConfig) -> dict[str, Any]:
    """The options that `read_grouped_experts` reads."""
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


FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(
    options: Options, fields: Fields, slides: Callable[[int, int], bool] | None
) -> Fields:
    """The window, and the layers that have none.

    Args:
      slides: (number of a layer, max_window_layers) -> whether it has a window where the file does
        not list them; None where all have, and no file can say otherwise.
    """
    window = options.take("sliding_window", default=4096)
    if not options.take("use_sliding_window", default=False):
        window = None
    last = options.take("max_window_layers", default=28)
    kinds = options.take("layer_types", default=None)
    layers = range(fields["num_layers"])
    default = [SLIDING if slides is None or slides(layer, last) else FULL for layer in layers]
    if window is None:
        default = [FULL for _ in layers]
    layer_types = default if kinds is None else kinds
    if len(layer_types) != len(layers) or set(layer_types) - {FULL, SLIDING}:
        raise options.unsupported("layer_types", kinds, f"{FULL} or {SLIDING} for each layer")
    if layer_types != default and (slides is None or window is None):
        why = "use_sliding_window=true" if window is None else "the same window in every layer"
        raise options.unsupported("layer_types", kinds, f"{SLIDING} with {why}")
    full = tuple(layer for layer, kind in zip(layers, layer_types, strict=True) if kind == FULL)
    if len(full) == len(layers):
        return {}
    return {"sliding_window": window, "full_attention_layers": full}


def read_listed_windows(
    options: Options, fields: Fields, window: int | None, slides: Callable[[int], bool]
) -> Fields:
    """The window and the layers that have none, of architectures whose files list them.

    Args:
      window: where the file says none.
      slides: number of a layer -> whether it has a window where the file does not list them.
    """
    window = options.take("sliding_window", default=window)
    kinds, layers = options.take("layer_types", default=None), range(fields["num_layers"])
    layer_types = (
        [SLIDING if slides(layer) else FULL for layer in layers] if kinds is None else kinds
    )
    if len(layer_types) != len(layers) or set(layer_types) - {FULL, SLIDING}:
        raise options.unsupported("layer_types", kinds, f"{FULL} or {SLIDING} for each layer")
    full = tuple(layer for layer, kind in zip(layers, layer_types, strict=True) if kind == FULL)
    if len(full) == len(layers):
        return {}
    if window is None:
        raise options.unsupported("sliding_window", None, f"a number with {SLIDING} layers")
    return {"sliding_window": window, "full_attention_layers": full}


def write_listed_windows(config: ModelConfig) -> dict[str, Any]:
    """The options that `read_listed_windows` reads."""
    has_window, full = config.sliding_window is not None, config.full_attention_layers
    kinds = [
        SLIDING if has_window and layer not in full else FULL for layer in range(config.num_layers)
    ]
    return {"sliding_window": config.sliding_window, "layer_types": kinds}


def write_windows(config: ModelConfig, listed: bool = True) -> dict[str, Any]:
    """The options that `read_windows` reads.

    Args:
      listed: the file may say which layers have windows.
    """
    if config.sliding_window is None:
        return {"use_sliding_window": False}
    full, layers = config.full_attention_layers, range(config.num_layers)
    kinds = [FULL if layer in full else SLIDING for layer in layers]
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        **({"layer_types": kinds} if listed else {}),
    }


def slides_last(layer: int, max_window_layers: int) -> bool:
    """Qwen2 and Qwen3: the first layers have no window."""
    return layer >= max_window_layers


def slides_alternately(layer: int, max_window_layers: int) -> bool:
    """Qwen2-MoE: every other of the first layers has one."""
    return layer % 2 == 0 and layer < max_window_layers
