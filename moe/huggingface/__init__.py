"""Public checkpoints: config.json and safetensors in, our weights laid out on a mesh; and back."""

from moe.huggingface.configuration import config_from, options_from
from moe.huggingface.reading import load, load_weights
from moe.huggingface.writing import fold_embedding_scale, save

__all__ = [
    "config_from",
    "fold_embedding_scale",
    "load",
    "load_weights",
    "options_from",
    "save",
]
