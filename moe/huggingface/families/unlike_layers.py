"""Options of dense architectures whose layers differ: OLMo 3, SmolLM3."""

from typing import Any

from moe.config import ModelConfig
from moe.huggingface.families.family import Fields
from moe.huggingface.families.shared_options import demand_no_biases, head_dim_of
from moe.huggingface.families.windows import read_listed_windows, written_listed_windows
from moe.huggingface.options import Options
from moe.huggingface.rotary_options import (
    read_rotary,
    read_rotary_by_window,
    written_rotary,
    written_rotary_by_window,
)


def read_olmo3(options: Options, fields: Fields) -> Fields:
    demand_no_biases(options, "attention_bias")
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        "norm_placement": "after",
        "query_key_norm": "projection",
        # Three of four layers where the file lists none.
        **read_listed_windows(options, fields, 4096, lambda layer: (layer + 1) % 4 != 0),
        **read_rotary_by_window(options, 500_000.0),
    }


def written_olmo3(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        **written_listed_windows(config),
        **written_rotary_by_window(config),
    }


def read_smollm3(options: Options, fields: Fields) -> Fields:
    demand_no_biases(options, "attention_bias", "mlp_bias")
    layers = range(fields["num_layers"])
    interval = options.take("no_rope_layer_interval", default=4)
    listed = options.take("no_rope_layers", default=None)
    # 1 is a layer that rotates.
    rotates = [(layer + 1) % interval != 0 for layer in layers] if listed is None else listed
    if len(rotates) < len(layers) or any(one not in (0, 1) for one in rotates):
        raise options.unsupported("no_rope_layers", listed, "1 or 0 for each layer")
    still = tuple(layer for layer in layers if not rotates[layer])
    # Without the first option the file may still name a window, which nothing has.
    slides = options.take("use_sliding_window", default=False)
    windows = read_listed_windows(options, fields, None, lambda layer: slides and layer in still)
    if windows and not slides:
        raise options.unsupported(
            "layer_types", options.values["layer_types"], "windows with use_sliding_window=true"
        )
    return {
        "d_ff": options.take("intermediate_size"),
        "head_dim": head_dim_of(options, fields),
        "head": "tied" if options.take("tie_word_embeddings", default=True) else "untied",
        "nope_layers": still,
        **windows,
        **read_rotary(options, default_base=2e6),
    }


def written_smollm3(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        "intermediate_size": config.d_ff,
        "head_dim": config.head_dim,
        "no_rope_layers": [
            int(layer not in config.nope_layers) for layer in range(config.num_layers)
        ],
        "use_sliding_window": config.sliding_window is not None,
        **written_listed_windows(config),
        **written_rotary(config),
    }
