"""Loading of a checkpoint's tensors into weights sharded over a mesh, without ever having all of
them in memory."""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from jax.sharding import NamedSharding
from jaxtyping import Array

from moe.config import ModelConfig
from moe.huggingface.configuration import Dtype, family_of, read_config
from moe.huggingface.families.family import Family
from moe.huggingface.options import Options
from moe.huggingface.quantised import PlainTensor, TensorSource, read_quantisation, tensor_sources
from moe.huggingface.tensors import Slices, Tensors, tensors_of
from moe.placement import in_chunks, shard_shardings, shardings, without_chunks
from moe.weights import Transformer, shapes
from sharding.folding import FoldedMesh
from sharding.former_names import former_keywords

DTYPES = ("F32", "BF16", "F16")
"""Of tensors that can be read, beside those of `moe.huggingface.quantised`; all become float32."""


def load(
    directory: str | Path, mesh: FoldedMesh, dtype: Dtype | None = None
) -> tuple[ModelConfig, Transformer[Array]]:
    """The network of a checkpoint and its weights, float32, sharded over `mesh`.

    Args:
      directory: holds config.json and .safetensors files, with or without an index.
      dtype: of activations, see `config_from`.

    Raises:
      ValueError: for what `config_from` and `load_weights` refuse.
    """
    config, _ = read_config(directory, dtype)
    return config, load_weights(directory, config, mesh)


@former_keywords(places="target_shardings")
def load_weights(
    directory: str | Path,
    config: ModelConfig,
    mesh: FoldedMesh,
    target_shardings: Transformer[NamedSharding] | None = None,
) -> Transformer[Array]:
    """The weights of a checkpoint, float32, sharded over `mesh` as `moe.placement.in_chunks` stores
    them.

    One shard of one weight is in host memory at a time, filled tensor by tensor: at most the share
    of one device in the largest weight. A process reads only what its own devices hold, and what
    several of them hold once.

    Args:
      directory: as for `load`.
      config: of the network, as `config_from` gave it.
      target_shardings: where the weights go; None is `moe.placement.shardings`.

    Raises:
      ValueError: when tensors are missing, left over, or of another shape or type than the network
        has: all of them are listed. Also when the layout cannot split them.
    """
    directory = Path(directory)
    family = family_of(directory)
    wanted = shardings(config, mesh) if target_shardings is None else target_shardings
    in_order = without_chunks(config, mesh)
    # Stages may hold layers out of order, or with padding: then by way of the smallest parts.
    first = wanted if in_order == mesh else shard_shardings(config, in_order)
    shards, structure = jax.tree.flatten(first)
    weight_shapes = jax.tree.leaves(shapes(config))
    plans = tensors_of(config, family)
    with ExitStack() as stack:
        quantisation = read_quantisation(Options.read(directory / "config.json"))
        files = tensor_sources(_open(directory, stack), quantisation)
        _check(files, plans, config, family, directory)
        leaves = [
            _weight(files, plan, leaf.shape, sharding)
            for plan, leaf, sharding in zip(plans, weight_shapes, shards, strict=True)
        ]
    weights = structure.unflatten(leaves)
    return weights if in_order == mesh else jax.device_put(in_chunks(weights, mesh), wanted)


def _open(directory: Path, stack: ExitStack) -> dict[str, PlainTensor]:
    """Each tensor in its open file."""
    paths = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.exists():
        # A directory may also hold the same tensors in one piece, under another name.
        paths = [directory / name for name in sorted(set(_read_weight_map(index).values()))]
    if not paths:
        raise ValueError(
            f"{directory} has no .safetensors file: convert the checkpoint to safetensors."
        )
    files: dict[str, PlainTensor] = {}
    for path in paths:
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{path} cannot be read as safetensors: {error}.") from error
        files |= {name: PlainTensor(file, path, name) for name in file.keys()}  # noqa: SIM118
    return files


def _read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it."""
    try:
        content = json.loads(index.read_bytes())
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
    """Refuses a checkpoint whose tensors are not those of the network."""
    expected = {name: plan.shape for plan in plans for _, name in plan.names()}
    wrong = [
        f"missing {name} {expected_shape}"
        for name, expected_shape in expected.items()
        if name not in files
    ]
    for name in sorted(files):
        shape, kind = files[name].shape, files[name].kind
        if name not in expected:
            if not _is_ignored(name, config, family):
                wrong.append(f"unknown {name} {shape}")
        elif shape != expected[name]:
            wrong.append(f"{name} is {shape}, not {expected[name]}")
        elif kind not in DTYPES:
            wrong.append(f"{name} is of type {kind}, not one of {', '.join(DTYPES)}")
    if wrong:
        raise ValueError(
            f"{directory} does not hold the tensors of this {family.architecture} "
            f"({len(wrong)} differ): {'; '.join(wrong)}."
        )


def _is_ignored(name: str, config: ModelConfig, family: Family) -> bool:
    """Tensors that say nothing: a tied head again, rotary tables, layers that predict further
    tokens and come after the network's own."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        (name == "lm_head.weight" and config.head == "tied")
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
        shard[plan.index_in_weight(offset)] = plan.to_ours(elements, selection).astype(np.float32)
    return shard
