"""Hugging Face checkpoints: config.json and safetensors to weights on a mesh, and back."""

from moe.huggingface.adapters import (
    adapters_of,
    check_head_copy,
    load_adapters,
    save_adapters,
)
from moe.huggingface.checkpoint import fold_embedding_scale, load, load_weights, save
from moe.huggingface.configuration import (
    architecture_of,
    config_from,
    idle_options,
    option_names,
    options_from,
)

__all__ = [
    "adapters_of",
    "architecture_of",
    "check_head_copy",
    "config_from",
    "fold_embedding_scale",
    "idle_options",
    "load",
    "load_adapters",
    "load_weights",
    "option_names",
    "options_from",
    "save",
    "save_adapters",
]
