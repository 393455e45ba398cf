"""Options that several architectures share: options of all, and groups of which families are
made."""

from collections.abc import Callable
from typing import Any

from moe.architecture.feed_forward import Activation
from moe.config import ModelConfig
from moe.huggingface.family import Fields, OptionGroup
from moe.huggingface.options import REQUIRED, Options
from moe.huggingface.quantised import read_quantisation

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""By their names in `transformers`."""


def option(field: str, *names: str, default: Any = REQUIRED) -> OptionGroup:
    """A field that an option states, under the first of its `names` when written; if none is passed
    it has the field's name."""
    names = names or (field,)
    return OptionGroup(
        lambda options, fields: {field: options.take(*names, default=default)},
        lambda config: {names[0]: getattr(config, field)},
    )


def fixed(**values: Any) -> OptionGroup:
    """Fields that an architecture does not leave open."""
    return OptionGroup(lambda options, fields: values)


def required(name: str, *accepted: Any, written: bool = True) -> OptionGroup:
    """An option of which only some values are supported, false if none is passed; the first is its
    value if a file lacks it."""
    accepted = accepted or (False,)

    def read(options: Options, fields: Fields) -> Fields:
        options.require(name, *accepted, default=accepted[0])
        return {}

    return OptionGroup(read, lambda config: {name: accepted[0]} if written else {})


def ignored(*names: str) -> OptionGroup:
    """Options that say what others do, or nothing."""

    def read(options: Options, fields: Fields) -> Fields:
        options.pass_over(*names)
        return {}

    return OptionGroup(read)


def activation(name: str, default: str) -> OptionGroup:
    """Activation of gate and up, under its name in `transformers`."""

    def read(options: Options, fields: Fields) -> Fields:
        stated = options.take(name, default=default)
        if stated not in ACTIVATIONS:
            raise options.unsupported(name, stated, " or ".join(map(repr, ACTIVATIONS)))
        return {"activation": ACTIVATIONS[stated]}

    def write(config: ModelConfig) -> dict[str, Any]:
        names = [name for name, ours in ACTIVATIONS.items() if ours == config.activation]
        # Of any other, which reads back as another one, the first.
        return {name: (names or list(ACTIVATIONS))[0]}

    return OptionGroup(read, write)


def head(tied: bool) -> OptionGroup:
    """The head: the embedding if a file says so or, with `tied`, if it says nothing."""

    def read(options: Options, fields: Fields) -> Fields:
        is_tied = options.take("tie_word_embeddings", default=tied)
        return {"head": "tied" if is_tied else "untied"}

    return OptionGroup(read, lambda config: {"tie_word_embeddings": config.head == "tied"})


def _read_kv_heads(options: Options, fields: Fields) -> Fields:
    read_quantisation(options)  # of the tensors, not of the network
    # Said by files that hold every option of the base class; no network here is made otherwise.
    for name in ("is_encoder_decoder", "add_cross_attention"):
        options.require(name, False, default=False)
    options.require("pruned_heads", None, {})
    stated = options.take("num_key_value_heads", default=None)
    return {"num_kv_heads": fields["num_heads"] if stated is None else stated}


MAX_LAYERS = 10_000
"""Layers of a network, at most: their kinds are listed one by one while a file is read."""


def _read_num_layers(options: Options, fields: Fields) -> Fields:
    num_layers = options.take("num_hidden_layers")
    if type(num_layers) is int and num_layers > MAX_LAYERS:
        raise options.unsupported("num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    return {"num_layers": num_layers}


def _write_max_positions(config: ModelConfig) -> dict[str, Any]:
    positions = config.max_positions
    return {} if positions is None else {"max_position_embeddings": positions}


COMMON = (
    activation("hidden_act", "silu"),
    option("vocab_size"),
    OptionGroup(_read_num_layers, lambda config: {"num_hidden_layers": config.num_layers}),
    option("d_model", "hidden_size"),
    option("num_heads", "num_attention_heads"),
    OptionGroup(_read_kv_heads, lambda config: {"num_key_value_heads": config.num_kv_heads}),
    option("norm_epsilon", "rms_norm_eps"),
    head(tied=False),
    fixed(embedding_scale=1.0, num_experts=0),
    OptionGroup(
        lambda options, fields: {
            "max_positions": options.take("max_position_embeddings", default=None)
        },
        _write_max_positions,
    ),
)
"""What every architecture has, under the same names."""


def _quotient(fields: Fields) -> int:
    return fields["d_model"] // fields["num_heads"]


def _read_head_dim(options: Options, fields: Fields) -> Fields:
    head_dim = options.take("head_dim", default=None)
    return {"head_dim": _quotient(fields) if head_dim is None else head_dim}


def _read_derived_head_dim(options: Options, fields: Fields) -> Fields:
    options.require("head_dim", None, _quotient(fields))
    return {"head_dim": _quotient(fields)}


HEAD_DIM = OptionGroup(_read_head_dim, lambda config: {"head_dim": config.head_dim})
DERIVED_HEAD_DIM = OptionGroup(_read_derived_head_dim)
"""The width of a head is the width of the network over the number of heads."""
DENSE_WIDTH = option("d_ff", "intermediate_size")
NO_ATTENTION_BIAS, NO_MLP_BIAS = required("attention_bias"), required("mlp_bias")


def _read_dense_layers(options: Options, fields: Fields) -> Fields:
    options.require("decoder_sparse_step", 1, default=1)
    layers = options.take("mlp_only_layers", default=None) or []
    if sorted(layers) != list(range(len(layers))):
        raise options.unsupported("mlp_only_layers", layers, "dense layers only before all others")
    width = options.take("intermediate_size")
    return {"num_dense_layers": len(layers), "dense_d_ff": width if layers else 0}


DENSE_LAYERS = OptionGroup(
    _read_dense_layers,
    lambda config: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.num_dense_layers)),
        "intermediate_size": config.dense_d_ff or config.d_expert,
    },
)
"""Qwen's dense layers among the layers with experts: supported if they come first."""


def experts(normalises: bool, width: str = "moe_intermediate_size") -> tuple[OptionGroup, ...]:
    """Routed experts of Qwen and OLMoE: `normalises` is the default of ``norm_topk_prob``, `width`
    the option of an expert's width."""
    return (
        option("num_experts", "num_experts", "num_local_experts"),
        option("experts_per_token", "num_experts_per_tok"),
        option("d_expert", width),
        option("renormalise", "norm_topk_prob", default=normalises),
    )


def grouped_experts(**defaults: Any) -> tuple[OptionGroup, ...]:
    """Routed experts chosen in groups by sigmoids, shared ones beside them, dense layers first,
    with the defaults of options that a file may lack."""

    def stated(field: str, *names: str) -> OptionGroup:
        return option(field, *names, default=defaults.get(names[0], REQUIRED))

    shared = stated("d_ff", "n_shared_experts")

    def read(options: Options, fields: Fields) -> Fields:
        k, groups_per_token = fields["experts_per_token"], fields["expert_groups_per_token"]
        if fields["num_expert_groups"] > 1 and k != 2 * groups_per_token:
            # There a group is judged by its best two, here by its best k / groups_per_token.
            raise options.unsupported(
                "num_experts_per_tok", k, f"2 x topk_group = {2 * groups_per_token}"
            )
        width = options.take("intermediate_size")
        return {
            "d_ff": shared.read(options, fields)["d_ff"] * fields["d_expert"],
            "dense_d_ff": width if fields["num_dense_layers"] else 0,
        }

    def write(config: ModelConfig) -> dict[str, Any]:
        return {
            "n_shared_experts": config.d_ff // max(config.d_expert, 1),
            "intermediate_size": config.dense_d_ff or config.d_expert,
            "num_nextn_predict_layers": 0,
        }

    return (
        stated("num_experts", "n_routed_experts", "num_local_experts"),
        stated("experts_per_token", "num_experts_per_tok"),
        stated("d_expert", "moe_intermediate_size"),
        stated("num_dense_layers", "first_k_dense_replace"),
        stated("renormalise", "norm_topk_prob"),
        stated("routed_scaling", "routed_scaling_factor"),
        stated("num_expert_groups", "n_group"),
        stated("expert_groups_per_token", "topk_group"),
        fixed(router_scores="sigmoid", selection_bias=True),
        OptionGroup(read, write),
    )


FULL, SLIDING = "full_attention", "sliding_attention"


def _read_layer_types(
    options: Options, fields: Fields, slides: Callable[[int], bool]
) -> tuple[list[str], tuple[int, ...]]:
    """Types of the layers, which a file may list, and the layers that have no window."""
    kinds, layers = options.take("layer_types", default=None), range(fields["num_layers"])
    layer_types = [SLIDING if slides(n) else FULL for n in layers] if kinds is None else kinds
    if len(layer_types) != len(layers) or set(layer_types) - {FULL, SLIDING}:
        raise options.unsupported("layer_types", kinds, f"{FULL} or {SLIDING} for each layer")
    return layer_types, tuple(n for n, kind in enumerate(layer_types) if kind == FULL)


def _write_layer_types(config: ModelConfig) -> list[str]:
    has_window, full = config.sliding_window is not None, config.full_attention_layers
    return [
        SLIDING if has_window and layer not in full else FULL for layer in range(config.num_layers)
    ]


def windows(slides: Callable[[int, int], bool] | None) -> OptionGroup:
    """Qwen's window, and the layers that have none.

    Args:
      slides: (index of a layer, max_window_layers) -> whether it has a window if the file does not
        list them; None if all have one, and no file can say otherwise.
    """

    def read(options: Options, fields: Fields) -> Fields:
        window = options.take("sliding_window", default=4096)
        if not options.take("use_sliding_window", default=False):
            window = None
        last = options.take("max_window_layers", default=28)
        default = [
            SLIDING if (slides is None or slides(layer, last)) and window is not None else FULL
            for layer in range(fields["num_layers"])
        ]
        layer_types, full = _read_layer_types(options, fields, lambda n: default[n] == SLIDING)
        if layer_types != default and (slides is None or window is None):
            why = "use_sliding_window=true" if window is None else "the same window in every layer"
            raise options.unsupported("layer_types", layer_types, f"{SLIDING} with {why}")
        if len(full) == len(layer_types):
            return {}
        return {"sliding_window": window, "full_attention_layers": full}

    def write(config: ModelConfig) -> dict[str, Any]:
        if config.sliding_window is None:
            return {"use_sliding_window": False}
        listed = {} if slides is None else {"layer_types": _write_layer_types(config)}
        return {"use_sliding_window": True, "sliding_window": config.sliding_window, **listed}

    return OptionGroup(read, write)


def read_listed_windows(
    options: Options, fields: Fields, window: int | None, slides: Callable[[int], bool]
) -> Fields:
    """The window and the layers that have none, of architectures whose files list them. If a file
    does not, `window` is the window, and `slides` tells whether a layer of some index has it."""
    window = options.take("sliding_window", default=window)
    layer_types, full = _read_layer_types(options, fields, slides)
    if len(full) == len(layer_types):
        return {}
    if window is None:
        raise options.unsupported("sliding_window", None, f"a number with {SLIDING} layers")
    return {"sliding_window": window, "full_attention_layers": full}


def write_listed_windows(config: ModelConfig) -> dict[str, Any]:
    """The options that `read_listed_windows` reads."""
    return {"sliding_window": config.sliding_window, "layer_types": _write_layer_types(config)}


def listed_windows(window: int, slides: Callable[[int], bool]) -> OptionGroup:
    """The group of `read_listed_windows` and `write_listed_windows`."""
    return OptionGroup(
        lambda options, fields: read_listed_windows(options, fields, window, slides),
        write_listed_windows,
    )


def slides_last(layer: int, max_window_layers: int) -> bool:
    """Qwen2 and Qwen3: the first layers have no window."""
    return layer >= max_window_layers


def slides_alternately(layer: int, max_window_layers: int) -> bool:
    """Qwen2-MoE: every other of the first layers has one."""
    return layer % 2 == 0 and layer < max_window_layers
