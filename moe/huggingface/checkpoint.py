"""Weights of a network from the tensors of a checkpoint, and back.

They are loaded into shards on a mesh without ever having all of them in memory, and written as
`transformers` reads them.
"""

import json
import math
import re
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from moe.config import Model, ModelConfig
from moe.huggingface.configuration import (
    Dtype,
    family_for,
    family_of,
    options_from,
    read_config,
)
from moe.huggingface.family import Family
from moe.huggingface.json_file import parse_json
from moe.huggingface.options import WITHOUT_EFFECT, Options
from moe.huggingface.quantised import PlainTensor, TensorSource, read_quantisation, tensor_sources
from moe.huggingface.tensors import Slices, Tensors, tensors_of
from moe.placement import in_chunks, shard_shardings, shardings, without_chunks
from moe.weights import Transformer, shapes
from sharding.folding import FoldedMesh

DTYPES = ("F32", "BF16", "F16")
"""Dtypes of tensors that can be read, beside the types of `moe.huggingface.quantised`; all become
float32."""
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""Ends of the names of two tensors."""
INDEX, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
"""The index, which says in which of several files each tensor is; and a single file."""
ADAPTERS = "adapter_model.safetensors"
"""The file of adapters; they are no weights of the network."""
COMPARED = 1 << 24
"""Elements of two tensors that are compared at a time."""
Entry = tuple[str, Tensors, int, tuple[int, ...]]
"""Name, how it is ordered, the index of its weight, its index in the weight's stack."""


def load(
    directory: str | Path, mesh: FoldedMesh, dtype: Dtype | None = None
) -> tuple[ModelConfig, Transformer[Array]]:
    """The network of a checkpoint and its weights, float32, sharded over `mesh`.

    Args:
      directory: folder of config.json and .safetensors files, and of their index if there is one.
      dtype: dtype of activations, see `config_from`.

    Raises:
      ValueError: for what `config_from` and `load_weights` refuse.
    """
    config, _ = read_config(directory, dtype)
    return config, load_weights(directory, Model(config, mesh))


def load_weights(
    directory: str | Path, model: Model, target_shardings: Transformer[NamedSharding] | None = None
) -> Transformer[Array]:
    """Loads the weights of a checkpoint, float32, sharded over the model's mesh as
    `moe.placement.in_chunks` stores them.

    One shard of one weight is in host memory at a time, filled tensor by tensor: at most the share
    of one device in the largest weight. A process reads only what its own devices hold, and what
    several of them hold once.

    Args:
      directory: as for `load`.
      model: its configuration as `config_from` gave it, on a mesh.
      target_shardings: where the weights go; None is `moe.placement.shardings`.

    Raises:
      ValueError: when tensors are missing, left over, or of another shape or type than the network
        has: all of them are listed. Also when the layout cannot split them.
    """
    config, directory = model.config, Path(directory)
    family = family_of(directory)
    wanted = shardings(model) if target_shardings is None else target_shardings
    in_order = without_chunks(model)
    # Stages may hold layers out of order, or with padding: then by way of the smallest parts.
    first = wanted if in_order == model else shard_shardings(in_order)
    shards, structure = jax.tree.flatten(first)
    weight_shapes = jax.tree.leaves(shapes(config))
    plans = tensors_of(config, family)
    with ExitStack() as stack:
        quantisation = read_quantisation(Options.read(directory / "config.json"))
        files = tensor_sources(open_tensors(directory, stack), quantisation)
        _check(files, plans, config, family, directory)
        _check_tied_head(files, config, directory)
        leaves = [
            _weight(files, plan, leaf.shape, sharding)
            for plan, leaf, sharding in zip(plans, weight_shapes, shards, strict=True)
        ]
    weights = structure.unflatten(leaves)
    if in_order == model:
        return weights
    return jax.device_put(in_chunks(weights, model.mesh), wanted)


def open_tensors(directory: Path, stack: ExitStack) -> dict[str, PlainTensor]:
    """Each tensor of a checkpoint in its open file, see `weight_files`."""
    import safetensors  # an extra

    files: dict[str, PlainTensor] = {}
    for path in weight_files(directory)[0]:
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}.") from error
        for name in file.keys():  # noqa: SIM118
            _add(files, name, PlainTensor(file, path, name))
    return _with_usual_names(files)


def weight_files(directory: Path) -> tuple[list[Path], list[Path]]:
    """The safetensors files that hold the weights, and those beside them that are not read.

    Weights are in the files of the index; if there is no index, in model.safetensors; if there is
    neither, in all.

    Raises:
      ValueError: there are none; there are two versions of them, of which other programs read one
        or the other; or adapters are among them.
    """
    present, index = sorted(directory.glob("*.safetensors")), directory / INDEX
    if index.exists():
        names = {Path(name).name for name in _read_weight_map(index).values()}
        if directory / SINGLE_FILE in present and SINGLE_FILE not in names:
            raise ValueError(
                f"{directory} has the weights twice, in {SINGLE_FILE} and in the files of {INDEX} "
                f"({', '.join(sorted(names)[:3])}, ...): remove one of the two."
            )
        chosen = [directory / name for name in sorted(names)]
    elif directory / SINGLE_FILE in present:
        chosen = [directory / SINGLE_FILE]
    else:
        chosen = present
    if not chosen:
        raise ValueError(
            f"{directory} has no .safetensors file: convert the checkpoint to safetensors."
        )
    if directory / ADAPTERS in present:
        raise ValueError(
            f"{directory} has adapters ({ADAPTERS}) beside the weights of a checkpoint: move them "
            "with adapter_config.json into a folder of their own, which --lora takes."
        )
    return chosen, [path for path in present if path not in chosen]


def _add(files: dict[str, PlainTensor], name: str, tensor: PlainTensor) -> None:
    """Adds a tensor; refuses a second one of its name."""
    if name in files:
        first = files[name]
        raise ValueError(
            f"the tensor {name} is there twice: as {first.name} in {first.path} and as "
            f"{tensor.name} in {tensor.path.name}: remove one of them."
        )
    files[name] = tensor


def _with_usual_names(files: dict[str, PlainTensor]) -> dict[str, PlainTensor]:
    """The tensors of the text network under ``model.`` and ``lm_head.``, whatever the prefix.

    Wrappers have another: ``language_model.model.`` or ``model.language_model.`` of multimodal
    networks, whose other parts are left out; ``_orig_mod.model.`` of torch.compile,
    ``module.model.`` of data parallelism; none if a network was saved without its head.
    """
    prefixes = {
        name.removesuffix(EMBEDDING) for name in files if ("." + name).endswith("." + EMBEDDING)
    }
    if len(prefixes) != 1 or prefixes == {"model."}:
        return files
    (prefix,) = prefixes
    heads = {f"{prefix.removesuffix('model.')}{HEAD}", f"{prefix}{HEAD}", HEAD}
    is_part = "language_model." in prefix
    usual: dict[str, PlainTensor] = {}
    for name, tensor in files.items():
        if name in heads:
            _add(usual, HEAD, tensor)
        elif name.startswith(prefix):
            _add(usual, f"model.{name.removeprefix(prefix)}", tensor)
        elif not is_part:
            _add(usual, name, tensor)
    return usual


def _read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it."""
    try:
        content = parse_json(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is not JSON: {error}.") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name.isprintable() for name in weight_map.values()
    ):
        raise ValueError(
            f'{index} has no "weight_map" from tensors to files: use the checkpoint\'s file.'
        )
    return weight_map


def _check(
    files: Mapping[str, TensorSource],
    plans: list[Tensors],
    config: ModelConfig,
    family: Family,
    directory: Path,
) -> None:
    """Refuses a checkpoint whose tensors do not match the network's."""
    expected = {name: plan.shape for plan in plans for _, name in plan.names()}
    wrong = [f"missing {name} {shape}" for name, shape in expected.items() if name not in files]
    for name in sorted(files):
        shape, kind = files[name].shape, files[name].kind
        if name not in expected:
            if not _is_ignored(name, config, family):
                wrong.append(f"unknown {name} {shape} in {files[name].path.name}")
        elif shape != expected[name]:
            wrong.append(f"{name} is {shape}, not {expected[name]}")
        elif kind not in DTYPES:
            wrong.append(f"{name} is of type {kind}, not one of {', '.join(DTYPES)}")
    if wrong:
        raise ValueError(
            f"{directory} does not hold the tensors of this {family.architecture} "
            f"({len(wrong)} differ): {'; '.join(wrong)}."
        )


def _check_tied_head(
    files: Mapping[str, TensorSource], config: ModelConfig, directory: Path
) -> None:
    """Refuses a head of its own beside tied embeddings, which nothing would read."""
    embedding = files.get(f"model.{EMBEDDING}")
    if config.head != "tied" or HEAD not in files or embedding is None:
        return
    if not same_values(files[HEAD], embedding):
        raise ValueError(
            f"{files[HEAD].path}: {HEAD} differs from model.{EMBEDDING}, and "
            f"{directory / 'config.json'} ties them: set tie_word_embeddings to false there to "
            f"use the head, or remove {HEAD}."
        )


def same_values(first: TensorSource, second: TensorSource) -> bool:
    """True if two tensors have the same numbers, whatever their types."""
    if first.shape != second.shape or not {first.kind, second.kind} <= {*DTYPES}:
        return False
    length = first.shape[0]
    rows = max(1, COMPARED // max(1, math.prod(first.shape[1:])))
    others = (slice(None),) * (len(first.shape) - 1)
    return all(
        np.array_equal(first.read((part, *others)), second.read((part, *others)))
        for part in (slice(i, min(i + rows, length)) for i in range(0, length, rows))
    )


def _is_ignored(name: str, config: ModelConfig, family: Family) -> bool:
    """Tensors that say nothing: a tied head again, rotary tables, layers that predict further
    tokens and come after the network's own."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        (name == HEAD and config.head == "tied")  # `_check_tied_head` looks at it
        or name.endswith(".rotary_emb.inv_freq")
        or (family.predicts_further and layer is not None and int(layer[1]) >= config.num_layers)
        or (family.predicts_further and name.startswith("mtp."))
    )


def _weight(
    files: Mapping[str, TensorSource],
    plan: Tensors,
    shape: tuple[int, ...],
    sharding: NamedSharding,
) -> Array:
    """One weight, each distinct shard read once and put on the devices that hold it."""
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        key = tuple(each.indices(n)[:2] for each, n in zip(index, shape, strict=True))
        holders.setdefault(key, []).append(device)
    shards = []
    for key, devices in holders.items():
        shard = _shard(files, plan, tuple(slice(*ends) for ends in key))
        shards += [jax.device_put(shard, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _shard(files: Mapping[str, TensorSource], plan: Tensors, index: Slices) -> np.ndarray:
    shape = tuple(span.stop - span.start for span in index)
    shard = np.empty(shape, np.float32)
    selection = tuple(span for dim, span in enumerate(index) if dim not in plan.dims)
    where, first = plan.slices_in_tensor(selection), [index[dim].start for dim in plan.dims]
    for offset in np.ndindex(*(shape[dim] for dim in plan.dims)):
        name = plan.name_at(tuple(a + b for a, b in zip(first, offset, strict=True)))
        elements = files[name].read(where)
        shard[plan.index_in_weight(offset)] = plan.to_ours(elements, selection)
    return shard


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
    """Writes config.json and safetensors, with an index if there are several files.

    The tensors of one file are in host memory at a time.

    Args:
      directory: created if it does not exist; it may hold no other .safetensors files.
      config: the network.
      weights: its weights, on devices of this process or on the host.
      architecture: as for `options_from`.
      dtype: dtype of the tensors in the files.
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
    options = options_from(config, family.architecture)
    about = about or {}
    if unknown := sorted(set(about) - WITHOUT_EFFECT):
        raise ValueError(
            f"about has {', '.join(unknown)}, which follow from the model: leave them out."
        )
    options |= {**about, "dtype": dtype, "torch_dtype": dtype}
    leaves = _check_weights(config, weights)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.safetensors*")):
        raise ValueError(f"{directory} already has .safetensors files: choose another directory.")
    entries = [
        (name, plan, weight_index, index)
        for weight_index, plan in enumerate(tensors_of(config, family))
        for index, name in plan.names()
    ]
    itemsize = jnp.dtype(dtype).itemsize
    files = _files(entries, itemsize, file_bytes)
    for file, file_entries in files.items():
        tensors = {
            name: _tensor(leaves[weight_index], plan, index, dtype)
            for name, plan, weight_index, index in file_entries
        }
        write_tensors(tensors, directory / file)
    if len(files) > 1:
        size = sum(math.prod(plan.shape) for _, plan, _, _ in entries) * itemsize
        weight_map = {name: file for file, listed in files.items() for name, *_ in listed}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(directory / INDEX, index)
    # Last: a directory with a config.json is whole.
    write_json(directory / "config.json", options)


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """A safetensors file that others may read as they may read any other new file: the library
    makes it readable for its owner alone."""
    from safetensors.numpy import save_file  # an extra

    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file of a checkpoint."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
        size = math.prod(entry[1].shape) * itemsize
        if groups[-1] and size > free_bytes:
            groups.append([])
            free_bytes = file_bytes
        groups[-1].append(entry)
        free_bytes -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {
        f"model-{index:05d}-of-{total:05d}.safetensors": group
        for index, group in enumerate(groups, start=1)
    }


def _tensor(
    leaf: Array | np.ndarray, plan: Tensors, index: tuple[int, ...], dtype: Dtype
) -> np.ndarray:
    theirs = plan.to_theirs(np.asarray(leaf[plan.index_in_weight(index)]))
    return np.ascontiguousarray(theirs.astype(jnp.dtype(dtype)))
