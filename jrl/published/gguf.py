"""Conversion of a GGUF file, the format of llama.cpp, into a Hugging Face checkpoint folder.

A GGUF file contains a whole model: options, tokenizer and chat template as metadata, and tensors,
most of them quantised. The folder has config.json, safetensors, tokenizer.json,
tokenizer_config.json, generation_config.json and a README.md with the license, and is
read like any other checkpoint.
"""

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jrl.published.base_name import OPTION, license_in_gguf, name_in_gguf, write_license
from jrl.published.gguf_file import GgufFile
from jrl.published.gguf_options import config_options
from jrl.published.gguf_tokenizer import tokenizer_files
from moe.huggingface.checkpoint import INDEX, write_json, write_tensors
from moe.huggingface.configuration import read_config
from moe.huggingface.tensors import tensors_of

FILE_BYTES = 2 * 10**9
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def convert(path: Path, folder: Path, ignore: Collection[str] = ()) -> None:
    """Writes the checkpoint folder of a GGUF file; a folder that exists is complete.

    Quantised tensors become float32, which represents their values exactly. If all matrices are
    bfloat16 or float16 already, config.json has bfloat16, then also the dtype of activations.

    Args:
      path: the GGUF file.
      folder: created; its parents too.
      ignore: names of metadata without effect, as stated by the user; they are in config.json.

    Raises:
      ValueError: if the file is not GGUF, or has an unsupported architecture, metadata, tokenizer
        or tensors; the message names them and the file.
    """
    if find_spec("gguf") is None:
        raise ValueError('converting GGUF needs the package gguf: run pip install -e ".[gguf]"')
    with _naming(path):
        file = GgufFile.read(path)
    options = config_options(file, str(path), ignore)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        temporary = Path(name) / folder.name
        temporary.mkdir()
        with _naming(path):
            write_json(temporary / "config.json", options | _name(file.metadata))
            write_license(temporary, license_in_gguf(file.metadata))
            for file_name, content in tokenizer_files(file.metadata).items():
                (temporary / file_name).write_bytes(content)
            _write_weights(temporary, options, file)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():  # no other process was first
                raise


def metadata_names(path: Path) -> set[str]:
    """Names of the metadata of a GGUF file."""
    with _naming(path):
        return set(GgufFile.read(path).metadata)


def _name(metadata: Mapping[str, Any]) -> dict[str, str]:
    name = name_in_gguf(metadata)
    return {} if name is None else {OPTION: name}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Adds the file's path to errors about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _write_weights(folder: Path, options: Mapping[str, Any], file: GgufFile) -> None:
    """Writes the tensors in files of about `FILE_BYTES`, with an index if there are several."""
    import gguf

    # Metadata that the user ignores are in config.json under their names in GGUF.
    config, family = read_config(folder, ignore=options)
    shapes = {name: plan.shape for plan in tensors_of(config, family) for _, name in plan.names()}
    kind = file.metadata["general.architecture"]
    architecture = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    name_map = gguf.get_tensor_name_map(architecture, options["num_hidden_layers"])
    unread = set(file.tensors) - {"rope_freqs.weight"}
    tensors, number = dict[str, np.ndarray](), 1
    weight_map: dict[str, str] = {}
    for name, tensor, source in _converted(shapes, options, file, name_map):
        unread.discard(source)
        if sum(array.nbytes for array in tensors.values()) > FILE_BYTES:
            write_tensors(tensors, folder / _file_name(number))
            tensors, number = {}, number + 1
        tensors[name], weight_map[name] = tensor, _file_name(number)
    if unread:
        raise ValueError(f"has tensors that are not supported: {', '.join(sorted(unread))}.")
    if number == 1:
        write_tensors(tensors, folder / "model.safetensors")
        return
    write_tensors(tensors, folder / _file_name(number))
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})


def _file_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


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
        values = _in_order(name, values, options, file.metadata["general.architecture"])
        if values.shape != shape:
            raise ValueError(f"{source} is {values.shape}, not {shape}.")
        yield name, np.ascontiguousarray(values), source


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _in_order(name: str, values: np.ndarray, options: Mapping[str, Any], kind: str) -> np.ndarray:
    """Values as the checkpoint has them, where llama.cpp's conversion changed them.

    Llama's rotary pairs are neighbouring rows in GGUF, and half a head apart here. Gemma's norms
    have one added.
    """
    if (num_heads := _num_paired_heads(name, options, kind)) is not None:
        by_head = values.reshape(num_heads, -1, 2, *values.shape[1:])
        return by_head.swapaxes(1, 2).reshape(values.shape)
    if kind == "gemma3" and name.endswith("norm.weight"):
        return values - np.float32(1.0)
    return values


def in_file_order(
    name: str, values: np.ndarray, options: Mapping[str, Any], kind: str
) -> np.ndarray:
    """Values as GGUF has them, the reverse of `_in_order`."""
    if (num_heads := _num_paired_heads(name, options, kind)) is not None:
        by_head = values.reshape(num_heads, 2, -1, *values.shape[1:])
        return by_head.swapaxes(1, 2).reshape(values.shape)
    if kind == "gemma3" and name.endswith("norm.weight"):
        return values + np.float32(1.0)
    return values


def _num_paired_heads(name: str, options: Mapping[str, Any], kind: str) -> int | None:
    """Heads of a tensor whose rotary pairs are neighbours in GGUF; None for other tensors."""
    if kind != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return None
    return options["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
