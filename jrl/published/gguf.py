"""Conversion of a GGUF file, the format of llama.cpp, into a Hugging Face checkpoint folder.

A GGUF file has everything of a model in one file: options, tokenizer and chat template as metadata,
and tensors, most of them quantised. The folder has config.json, safetensors, tokenizer.json,
tokenizer_config.json and generation_config.json, and is read like any other checkpoint.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jrl.published.gguf_file import GgufFile
from jrl.published.gguf_tokenizer import tokenizer_files
from moe.huggingface.checkpoint import write_tensors
from moe.huggingface.configuration import read_config
from moe.huggingface.tensors import tensors_of

Metadata = Mapping[str, Any]

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""The `architectures` and `model_type` of config.json by `general.architecture` of GGUF."""
LLAMA3_FACTORS = (8.0, 32.0)
"""RoPE scaling factors of Llama 3.1 and 3.2; GGUF has only the frequencies that follow from one."""
GEMMA3_PERIOD = 6
"""Every sixth layer of Gemma 3 attends to the whole sequence."""
GEMMA3_LARGEST = 62
"""Layers of Gemma 3 27B, whose attention scale is that of the width over the heads."""
HALF_PRECISION = (1, 30)
"""Numbers of the types float16 and bfloat16."""
FILE_BYTES = 2 * 10**9
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def convert(path: Path, folder: Path) -> None:
    """Writes the checkpoint folder of a GGUF file; a folder that exists is complete.

    Quantised tensors become float32, which holds their values exactly. Where all matrices are
    bfloat16 or float16 already, config.json says bfloat16, the dtype of activations then.

    Args:
      path: the GGUF file.
      folder: created; its parents too.

    Raises:
      ValueError: where the file is not GGUF, or has an architecture, a tokenizer or tensors that
        are not supported: named, with the file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        temporary = Path(name) / folder.name
        temporary.mkdir()
        try:
            _write(path, temporary)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if folder.exists():  # another process was first
            return
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(temporary)


def _write(path: Path, folder: Path) -> None:
    if find_spec("gguf") is None:
        raise ValueError('converting GGUF needs the package gguf: run pip install -e ".[gguf]"')
    file = GgufFile.read(path)
    options = config_options(file)
    _write_json(folder / "config.json", options)
    for name, content in tokenizer_files(file.metadata).items():
        (folder / name).write_bytes(content)
    _write_weights(folder, options, file)


def config_options(file: GgufFile) -> dict[str, Any]:
    """The config.json of a GGUF file.

    Raises:
      ValueError: for an architecture or a RoPE scaling that is not supported.
    """
    metadata, tensors = file.metadata, file.tensors
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture={kind!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}."
        )
    option = partial(_option, metadata, kind)
    if kind != "qwen3moe" and option("expert_count", 0):
        raise ValueError(f"{kind}.expert_count={option('expert_count')} is not supported.")
    architecture, model_type = ARCHITECTURES[kind]
    num_heads, width = option("attention.head_count"), option("embedding_length")
    head_dim = option("attention.key_length", option("rope.dimension_count", width // num_heads))
    options = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": width,
        "intermediate_size": option("feed_forward_length"),
        "num_hidden_layers": option("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": option("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": option("context_length"),
        "rms_norm_eps": _shortest(option("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(option("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16" if _is_half(file) else "float32",
        **_token_ids(metadata),
    }
    if kind == "qwen3moe":
        options |= {
            "num_experts": option("expert_count"),
            "num_experts_per_tok": option("expert_used_count"),
            "moe_intermediate_size": option("expert_feed_forward_length"),
            "norm_topk_prob": option("expert_weights_norm", True),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if kind == "gemma3":
        largest = option("block_count") == GEMMA3_LARGEST
        options |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": width // num_heads if largest else head_dim,
            "sliding_window": option("attention.sliding_window"),
            "sliding_window_pattern": GEMMA3_PERIOD,
            "rope_local_base_freq": 10_000.0,
        }
    else:
        options["hidden_act"] = "silu"
    if (scaling := _rope_scaling(file, kind, options)) is not None:
        options["rope_scaling"] = scaling
    return options


def _option(metadata: Metadata, kind: str, name: str, default: Any = None) -> Any:
    value = metadata.get(f"{kind}.{name}", default)
    if value is None:
        raise ValueError(f"the metadata lack {kind}.{name}.")
    return value


def _shortest(value: float) -> float:
    """The decimal number that a float32 was written as: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _is_half(file: GgufFile) -> bool:
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    return all(tensor.kind in HALF_PRECISION for tensor in matrices)


def _token_ids(metadata: Metadata) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {
        ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()
    }
    return {name: int(value) for name, value in ids.items() if value is not None}


def _rope_scaling(file: GgufFile, kind: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    option = partial(_option, file.metadata, kind)
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file.values("rope_freqs.weight"), options)
    scaling, factor = option("rope.scaling.type", "none"), option("rope.scaling.factor", 1.0)
    if scaling == "none" or factor == 1.0:
        return None
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        original = option("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ValueError(f"{kind}.rope.scaling.type={scaling!r} is not supported: none, linear, yarn.")


def _llama3_scaling(divisors: np.ndarray, options: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE scaling of Llama 3, recognised by the divisors that it gives the frequencies."""
    for factor in LLAMA3_FACTORS:
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = _llama3_divisors(scaling, options["rope_theta"], options["head_dim"])
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4):
            return scaling
    raise ValueError("rope_freqs.weight is the RoPE scaling of no Llama 3, and is not supported.")


def _llama3_divisors(scaling: Mapping[str, Any], base: float, head_dim: int) -> np.ndarray:
    frequencies = base ** -(np.arange(0, head_dim, 2) / head_dim)
    rotations = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    unscaled = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - unscaled) / scaling["factor"] + unscaled)


def _write_weights(folder: Path, options: Mapping[str, Any], file: GgufFile) -> None:
    """Writes the tensors in files of about `FILE_BYTES`, with an index where there are several."""
    import gguf

    config, family = read_config(folder)
    shapes = {name: plan.shape for plan in tensors_of(config, family) for _, name in plan.names()}
    kind = {theirs: ours for ours, (_, theirs) in ARCHITECTURES.items()}[options["model_type"]]
    architecture = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    name_map = gguf.get_tensor_name_map(architecture, options["num_hidden_layers"])
    unread = set(file.tensors) - {"rope_freqs.weight"}
    if options["tie_word_embeddings"]:
        unread -= {"output.weight"}
    files: list[dict[str, np.ndarray]] = [{}]
    weight_map: dict[str, int] = {}
    for name, tensor, source in _converted(shapes, options, file, name_map):
        unread.discard(source)
        if files[-1] and sum(array.nbytes for array in files[-1].values()) > FILE_BYTES:
            write_tensors(files[-1], folder / f"model-{len(files):05d}.safetensors")
            files[-1] = {}
            files.append({})
        files[-1][name] = tensor
        weight_map[name] = len(files)
    if unread:
        raise ValueError(f"has tensors that are not supported: {', '.join(sorted(unread))}.")
    if len(files) == 1:
        write_tensors(files[0], folder / "model.safetensors")
        return
    write_tensors(files[-1], folder / f"model-{len(files):05d}.safetensors")
    index = {name: f"model-{number:05d}.safetensors" for name, number in weight_map.items()}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _converted(
    shapes: Mapping[str, tuple[int, ...]],
    options: Mapping[str, Any],
    file: GgufFile,
    name_map: Any,
) -> Iterator[tuple[str, np.ndarray, str]]:
    """Name in the checkpoint, values, and name in the GGUF file, of each tensor."""
    stacked: dict[str, np.ndarray] = {}  # of the layer at hand: dequantised once for all experts
    for name, shape in shapes.items():
        expert = EXPERT.search(name)
        base = EXPERT.sub(".experts.", name)
        source = name_map.get_name(base, try_suffixes=(".weight", ".bias"))
        if source not in file.tensors:
            raise ValueError(f"lacks the tensor {source or base} of {name}.")
        if expert is None:
            values = file.values(source)
        else:
            if source not in stacked:
                stacked = {key: v for key, v in stacked.items() if _layer(key) == _layer(source)}
                stacked[source] = file.values(source)
            values = stacked[source][int(expert[1])]
        values = _in_order(name, values, options)
        if values.shape != shape:
            raise ValueError(f"{source} is {values.shape}, not {shape}.")
        yield name, np.ascontiguousarray(values), source


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _in_order(name: str, values: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    """Values as the checkpoint has them, where llama.cpp's conversion changed them.

    Llama's rotary pairs are neighbouring rows in GGUF, and half a head apart here. Gemma's norms
    have one added.
    """
    if options["model_type"] == "llama" and (".q_proj." in name or ".k_proj." in name):
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        by_head = values.reshape(options[key], -1, 2, *values.shape[1:])
        return by_head.swapaxes(1, 2).reshape(values.shape)
    if options["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
        return values - np.float32(1.0)
    return values


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
