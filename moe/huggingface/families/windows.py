"""Options of Qwen's sliding windows, which only some layers have."""

from collections.abc import Callable
from typing import Any

from moe.config import ModelConfig
from moe.huggingface.families.family import Fields
from moe.huggingface.options import Options

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
