"""GGUF file of a checkpoint folder, the reverse of `jrl.published.gguf`.

The metadata are read back before the file gets its name: a network or a tokenizer that they do not
express is refused by what differs, so that llama.cpp computes what the checkpoint does.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jrl.published.base_name import HUB, gguf_license, is_hub_name
from jrl.published.gguf import EXPERT, in_file_order
from jrl.published.gguf_file import GgufFile
from jrl.published.gguf_options import FAMILIES, config_options, llama3_divisors
from jrl.published.gguf_vocabulary import check_vocabulary, vocabulary_metadata
from moe.config import ModelConfig
from moe.huggingface.checkpoint import open_tensors, write_json
from moe.huggingface.configuration import options_from, read_config
from moe.huggingface.dense_families import MISTRAL
from moe.huggingface.family import Family
from moe.huggingface.quantised import PlainTensor
from moe.huggingface.tensors import tensors_of

KINDS = {family.architecture: kind for kind, family in FAMILIES.items()}
KINDS[MISTRAL.architecture] = "llama"
"""`general.architecture` of GGUF by the class of transformers."""
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type` by the type of the matrices."""
Quantisation = Literal["q8_0"]


@dataclass(frozen=True)
class Description:
    """Entries of the file about the model.

    Attributes:
      name: of the model.
      base: name of the checkpoint that it was trained from; None for none.
    """

    name: str
    base: str | None = None


def write_gguf(
    folder: Path, path: Path, description: Description, quantise: Quantisation | None = None
) -> None:
    """Writes a checkpoint folder as a GGUF file.

    Matrices keep the dtype that config.json states, or are quantised; vectors and the routers of
    quantised files are float32.

    Args:
      path: of the file, which may not exist.
      quantise: of the matrices whose rows divide into blocks of 32.

    Raises:
      ValueError: for an architecture, options or a tokenizer that GGUF does not express, and a file
        that exists.
    """
    if find_spec("gguf") is None:
        raise ValueError('writing GGUF needs the package gguf: run pip install -e ".[gguf]"')
    if path.exists():
        raise ValueError(f"{path} already exists: choose another name.")
    config, family = read_config(folder)
    kind = KINDS.get(family.architecture)
    if kind is None:
        raise ValueError(
            f"{family.architecture} cannot be written as GGUF; supported: {', '.join(KINDS)}."
        )
    options = options_from(config, family.architecture)
    vocabulary = vocabulary_metadata(folder, config.vocab_size)
    matrices = (
        quantise.upper() if quantise else {"float32": "F32", "bfloat16": "BF16"}[config.dtype]
    )
    metadata = {
        **_description(description),
        **gguf_license(folder),
        "general.file_type": FILE_TYPES[matrices],
        "general.quantization_version": 2,
        **{f"{kind}.{name}": value for name, value in _network(kind, options).items()},
        **vocabulary,
    }
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=f".{path.name}.") as name:
        temporary = Path(name) / path.name
        _write(temporary, kind, metadata, _Tensors(folder, kind, config, family, options), matrices)
        _check_network(GgufFile.read(temporary), config, Path(name))
        check_vocabulary(folder, GgufFile.read(temporary).metadata)
        temporary.rename(path)


def _description(description: Description) -> dict[str, Any]:
    entries: dict[str, Any] = {"general.type": "model", "general.name": description.name}
    if description.base is not None:
        entries["general.base_model.count"] = 1
        entries["general.base_model.0.name"] = description.base.rpartition("/")[2]
        if is_hub_name(description.base):
            entries["general.base_model.0.repo_url"] = HUB + description.base
    return entries


def _network(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of the architecture, without its prefix."""
    width, num_heads = options["hidden_size"], options["num_attention_heads"]
    head_dim = options.get("head_dim") or width // num_heads
    if options.get("max_position_embeddings") is None:
        raise ValueError("the network states no max_position_embeddings, which GGUF needs.")
    entries = {
        "vocab_size": options["vocab_size"],
        "context_length": options["max_position_embeddings"],
        "embedding_length": width,
        "block_count": options["num_hidden_layers"],
        "feed_forward_length": options["intermediate_size"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": options["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(options["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(options["rope_theta"]),
    }
    if kind == "qwen3moe":
        entries["expert_count"] = options["num_experts"]
        entries["expert_used_count"] = options["num_experts_per_tok"]
        entries["expert_feed_forward_length"] = options["moe_intermediate_size"]
    if kind == "gemma3":
        entries["attention.sliding_window"] = options["sliding_window"]
    scaling = _scaling(options)
    if scaling is not None and scaling["rope_type"] in ("linear", "yarn"):
        entries["rope.scaling.type"] = scaling["rope_type"]
        entries["rope.scaling.factor"] = float(scaling["factor"])
        if scaling["rope_type"] == "yarn":
            original = scaling["original_max_position_embeddings"]
            entries["rope.scaling.original_context_length"] = original
    return entries


def _scaling(options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """RoPE scaling of the layers without windows; None for none."""
    by_window = options.get("rope_parameters", {}).get("full_attention", {})
    scaling = options.get("rope_scaling") or by_window
    return None if scaling.get("rope_type", "default") == "default" else scaling


@dataclass(frozen=True)
class _Tensors:
    """Tensors of a checkpoint under their names in GGUF."""

    folder: Path
    kind: str
    config: ModelConfig
    family: Family
    options: Mapping[str, Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name."""
        shapes = {}
        for name, (sources, shape) in self._sources().items():
            shapes[name] = (len(sources), *shape) if EXPERT.search(sources[0]) else shape
        if (divisors := self._divisors()) is not None:
            shapes["rope_freqs.weight"] = divisors.shape
        return shapes

    def values(self) -> Iterator[np.ndarray]:
        """Values in float32, in the order of `shapes`."""
        with ExitStack() as stack:
            files = open_tensors(self.folder, stack)
            for sources, _ in self._sources().values():
                arrays = [_read(files[name]) for name in sources]
                values = np.stack(arrays) if EXPERT.search(sources[0]) else arrays[0]
                yield in_file_order(sources[0], values, self.options, self.kind)
        if (divisors := self._divisors()) is not None:
            yield divisors

    def _sources(self) -> dict[str, tuple[list[str], tuple[int, ...]]]:
        """Names in the checkpoint, several for stacked experts, and shape, by name in GGUF."""
        import gguf

        architecture = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[self.kind]
        names = gguf.get_tensor_name_map(architecture, self.config.num_layers)
        sources: dict[str, tuple[list[str], tuple[int, ...]]] = {}
        for plan in tensors_of(self.config, self.family):
            for _, name in plan.names():
                theirs = names.get_name(EXPERT.sub(".experts.", name), (".weight", ".bias"))
                if theirs is None:
                    raise ValueError(f"{name} has no name in GGUF's architecture {self.kind}.")
                sources.setdefault(theirs, ([], plan.shape))[0].append(name)
        for listed, _ in sources.values():
            listed.sort(key=_expert_number)
        return sources

    def _divisors(self) -> np.ndarray | None:
        scaling = _scaling(self.options)
        if scaling is None or scaling["rope_type"] != "llama3":
            return None
        base, head_dim = self.options["rope_theta"], self.config.head_dim
        return llama3_divisors(scaling, base, head_dim).astype(np.float32)


def _read(tensor: PlainTensor) -> np.ndarray:
    return tensor.read((slice(None),) * len(tensor.shape)).astype(np.float32)


def _expert_number(name: str) -> int:
    match = EXPERT.search(name)
    return 0 if match is None else int(match[1])


def _write(
    path: Path, kind: str, metadata: Mapping[str, Any], tensors: _Tensors, matrices: str
) -> None:
    """Writes the file, one tensor in memory at a time."""
    import gguf

    writer = gguf.GGUFWriter(path, kind)
    for name, value in metadata.items():
        writer.add_key_value(name, value, _value_type(value), _item_type(value))
    types = []
    for name, shape in tensors.shapes().items():
        stored = gguf.GGMLQuantizationType[_stored_type(name, shape, matrices)]
        block, num_bytes = gguf.GGML_QUANT_SIZES[stored]
        size = int(np.prod(shape)) // block * num_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=stored)
        types.append(stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for stored, values in zip(types, tensors.values(), strict=True):
        writer.write_tensor_data(gguf.quantize(np.ascontiguousarray(values), stored))
    writer.close()


def _stored_type(name: str, shape: Sequence[int], matrices: str) -> str:
    """Type of a tensor: of the matrices, or float32 for what llama.cpp does not quantise."""
    if len(shape) < 2:
        return "F32"
    if matrices == "Q8_0" and (shape[-1] % 32 or "ffn_gate_inp" in name):
        return "F32"
    return matrices


def _value_type(value: Any) -> Any:
    import gguf

    types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return gguf.GGUFValueType[types[type(value)]]


def _item_type(value: Any) -> Any:
    import gguf

    if not isinstance(value, list):
        return None
    return gguf.GGUFValueType.INT32 if type(value[0]) is int else _value_type(value[0])


def _check_network(file: GgufFile, config: ModelConfig, folder: Path) -> None:
    """Refuses a network that the file's metadata do not describe."""
    write_json(folder / "config.json", config_options(file))
    read = replace(read_config(folder / "config.json")[0], dtype=config.dtype)
    lost = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in fields(config)
        if getattr(config, field.name) != getattr(read, field.name)
    ]
    if lost:
        kind = file.metadata["general.architecture"]
        raise ValueError(f"GGUF's architecture {kind} cannot express {', '.join(lost)}.")
