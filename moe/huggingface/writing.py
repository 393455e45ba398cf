"""Export of weights to a checkpoint that `transformers` reads."""

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors.numpy import save_file

from moe.config import ModelConfig
from moe.huggingface.configuration import Dtype, family_for, options_from
from moe.huggingface.options import WITHOUT_EFFECT
from moe.huggingface.tensors import Tensors, tensors_of
from moe.weights import Transformer, shapes

Entry = tuple[str, Tensors, int, tuple[int, ...]]
"""Name, how it is ordered, the index of its weight, its index in the weight's stack."""


def save(
    directory: str | Path,
    config: ModelConfig,
    weights: Transformer[Array] | Transformer[np.ndarray],
    *,
    architecture: str | None = None,
    dtype: Dtype = "float32",
    file_bytes: int = 5 * 10**9,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes config.json and safetensors, with an index where there are several files.

    The tensors of one file are in host memory at a time.

    Args:
      directory: made where it does not exist; it may hold no other .safetensors files.
      config: the network.
      weights: its weights, on devices of this process or on the host.
      architecture: as for `options_from`.
      dtype: of the tensors in the files.
      file_bytes: size of a file at most, unless one tensor is larger.
      about: options of config.json that change no logit, for example eos_token_id or
        max_position_embeddings.

    Raises:
      ValueError: when no architecture expresses the network, `about` has other options, weights are
        of another shape than `config` has or on devices of other processes, or the directory has
        such files.
    """
    directory = Path(directory)
    family = family_for(config, architecture)
    options = options_from(config, family.architecture) | _check_about(about or {})
    options |= {"dtype": dtype, "torch_dtype": dtype}
    leaves = _check_weights(config, weights)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.safetensors*")):
        raise ValueError(f"{directory} already has .safetensors files: choose another directory.")
    entries = [
        (name, plan, weight_index, index)
        for weight_index, plan in enumerate(tensors_of(config, family))
        for index, name in plan.names()
    ]
    files = _files(entries, jnp.dtype(dtype).itemsize, file_bytes)
    for file, file_entries in files.items():
        tensors = {
            name: _tensor(leaves[weight_index], plan, index, dtype)
            for name, plan, weight_index, index in file_entries
        }
        write_tensors(tensors, directory / file)
    if len(files) > 1:
        _write_index(directory, files, jnp.dtype(dtype).itemsize)
    # Last: a directory with a config.json is whole.
    _write_json(directory / "config.json", options)


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """A safetensors file that others may read as they may read any other new file: the library
    makes it readable for its owner alone."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def fold_embedding_scale(
    config: ModelConfig, weights: Transformer[Array]
) -> tuple[ModelConfig, Transformer[Array]]:
    """The same network with the factor on embeddings multiplied into them.

    Raises:
      ValueError: for a tied head, which the factor does not multiply.
    """
    if config.head == "tied":
        raise ValueError('head="tied" shares the embedding, so its scale cannot be folded in.')
    scale = config.d_model**0.5 if config.embedding_scale is None else config.embedding_scale
    return replace(config, embedding_scale=1.0), replace(
        weights, embedding=weights.embedding * scale
    )


def _check_about(about: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(about) - WITHOUT_EFFECT):
        raise ValueError(
            f"about has {', '.join(unknown)}, which follow from the model: leave them out."
        )
    return dict(about)


def _check_weights(config: ModelConfig, weights: Transformer[Any]) -> list[Array | np.ndarray]:
    wanted, leaves = shapes(config), jax.tree.leaves(weights)
    if jax.tree.structure(wanted) != jax.tree.structure(weights):
        raise ValueError("weights do not fit config: their trees differ.")
    for expected, leaf in zip(jax.tree.leaves(wanted), leaves, strict=True):
        if expected.shape != leaf.shape:
            raise ValueError(
                f"weights do not fit config: a weight has shape {leaf.shape}, not {expected.shape}."
            )
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                "weights are sharded over multiple processes: write them from a single-process run."
            )
    return leaves


def _files(entries: list[Entry], itemsize: int, file_bytes: int) -> dict[str, list[Entry]]:
    """The tensors of each file, in order, as many in each as fit."""
    groups: list[list[Entry]] = [[]]
    free_bytes = file_bytes
    for entry in entries:
        size = int(np.prod(entry[1].shape)) * itemsize
        if groups[-1] and size > free_bytes:
            groups.append([])
            free_bytes = file_bytes
        groups[-1].append(entry)
        free_bytes -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {
        f"model-{number:05d}-of-{total:05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _tensor(
    leaf: Array | np.ndarray, plan: Tensors, index: tuple[int, ...], dtype: Dtype
) -> np.ndarray:
    theirs = plan.to_theirs(np.asarray(leaf[plan.index_in_weight(index)]))
    return np.ascontiguousarray(theirs.astype(jnp.dtype(dtype)))


def _write_index(directory: Path, files: dict[str, list[Entry]], itemsize: int) -> None:
    size = sum(
        int(np.prod(entry[1].shape)) for file_entries in files.values() for entry in file_entries
    )
    index = {
        "metadata": {"total_size": size * itemsize},
        "weight_map": {
            entry[0]: file for file, file_entries in files.items() for entry in file_entries
        },
    }
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
