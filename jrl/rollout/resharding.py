"""Meshes that decode, and the transfer of the policy to them from the training mesh: one mesh with
another layout or other devices, or separate device groups of attention and experts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding
from jaxtyping import Array

from moe import placement
from moe.adapters import has_adapters, is_adapted, merge_adapters, without_adapters
from moe.config import Model, ModelConfig
from moe.disaggregated.placement import Placement
from moe.disaggregated.split import Split, SplitMesh, devices_of, fold_split
from moe.disaggregated.weights import SplitWeights, split_weights
from moe.weights import Transformer, axis_sizes, table
from sharding.folding import FoldedMesh, Layout, fold
from sharding.sharded_jit import jit_onto


def rollout_layout(training: Layout) -> Layout:
    """Default layout of decoding.

    Decoding needs all layers and whole sequences on every device, so ``pp`` and ``cp`` become part
    of ``dp``, which reads weights more often and communicates least; ``tp``, ``ep`` and ``etp``
    stay, and ``edp`` grows. Without ``pp`` and ``cp`` it is the layout of training.
    """
    dp = training.dp * training.cp * training.pp
    return replace(training, dp=dp, cp=1, pp=1, vpp=1)


def rollout_mesh(text: str | None, training: FoldedMesh) -> FoldedMesh:
    """Mesh of decoding over the devices of `training`, in their order.

    Args:
      text: the requested layout; None derives it.

    Raises:
      ValueError: for a layout that cannot decode, or one of another number of devices.
    """
    layout = rollout_layout(training.layout) if text is None else Layout.parse(text)
    if layout.pp > 1 or layout.cp > 1:
        raise ValueError(
            f"rollout layout {text!r}: decoding needs all layers and full sequences on every "
            f"device; pp and cp must be 1, for example {str(rollout_layout(layout))!r}."
        )
    if layout.num_devices != training.layout.num_devices:
        raise ValueError(
            f"rollout layout {text!r} needs {layout.num_devices} devices and the layout of "
            f"training has {training.layout.num_devices}: choose sizes whose product is that."
        )
    if layout == training.layout:
        return training
    return fold(layout, devices_of(training))


def separate_rollout_mesh(text: str | None, num_devices: int, training: FoldedMesh) -> FoldedMesh:
    """Mesh of decoding on separate devices: devices of this process after the ones of `training`.

    Args:
      text: the requested layout; None is data parallelism over all of them.
      num_devices: number of devices.

    Raises:
      ValueError: for a layout that cannot decode, or one of another number of devices, and if there
        are too few devices.
    """
    layout = Layout.parse(f"dp{num_devices}" if text is None else text)
    if layout.pp > 1 or layout.cp > 1 or layout.num_devices != num_devices:
        raise ValueError(
            f"rollout layout {text!r} does not fit rollout_devices={num_devices}: its sizes must "
            f"have that product, without pp and cp, for example 'dp{num_devices}'."
        )
    return fold(layout, _devices_after(training, num_devices))


def _devices_after(training: FoldedMesh, num_devices: int) -> list[Any]:
    """Devices of this process after the devices of training; raises ValueError if there are too
    few, and in a run of multiple processes."""
    learning, devices = training.layout.num_devices, jax.devices()
    if jax.process_count() > 1:
        raise ValueError(
            f"rollout_devices={num_devices} are devices of one process, and the run has "
            f"{jax.process_count()}: leave it out to alternate sampling and training."
        )
    if len(devices) < learning + num_devices:
        raise ValueError(
            f"rollout_devices={num_devices} and the {learning} of layout {str(training.layout)!r} "
            f"are {learning + num_devices} devices and there are {len(devices)}: choose fewer, or "
            f"--devices {learning + num_devices} to have as many fake ones on a CPU."
        )
    return devices[learning : learning + num_devices]


def split_mesh(text: str, num_devices: int | None, training: FoldedMesh) -> SplitMesh:
    """Meshes of the attention and expert device groups.

    Args:
      text: the split, as `moe.disaggregated.split.Split.parse` reads it.
      num_devices: number of devices after the devices of training, in this process; None takes the
        devices of training, time-shared (colocated).

    Raises:
      ValueError: for a split of another number of devices, or of more than there are, and for
        separate devices in a run of multiple processes.
    """
    split = Split.parse(text)
    learning = devices_of(training)
    if num_devices is None:
        if split.num_devices != len(learning):
            raise ValueError(
                f"rollout_split={text!r} has {split.num_devices} devices and the layout of "
                f"training {len(learning)}: choose sizes whose sum is that, or give "
                f"--rollout-devices {split.num_devices} to use other devices."
            )
        return fold_split(split, learning)
    if split.num_devices != num_devices:
        raise ValueError(
            f"rollout_split={text!r} has {split.num_devices} devices and rollout_devices="
            f"{num_devices}: make them the same."
        )
    return fold_split(split, _devices_after(training, num_devices))


def are_disjoint(training: FoldedMesh, rollout: FoldedMesh) -> bool:
    """True if the two meshes share no device."""
    return {*devices_of(training)}.isdisjoint(devices_of(rollout))


def rollout_policy(
    weights: Transformer[Array], model: Model, rollout: FoldedMesh
) -> Transformer[Array]:
    """Policy on the rollout mesh, stored as `moe.placement.in_chunks` describes.

    If both meshes are equal it is the trained policy itself, but for weights with adapters, which
    are merged in the compiled function that moves the weights. Otherwise they are moved in their
    dtypes: a device receives at most its shard on the rollout mesh, ``itemsize x elements / devices
    a weight is split over there`` bytes, less what it holds already.

    Args:
      weights: on the mesh of `model`, of training.
      rollout: over the devices of training, in the same order, or over others.
    """
    if rollout == model.mesh and not has_adapters(weights):
        return weights
    return reshard(weights, model, rollout)


def split_policy(
    weights: Transformer[Array], model: Model, mesh: SplitMesh, experts: Sequence[Placement]
) -> SplitWeights[Array]:
    """Policy on the device groups of attention and experts. Each device receives its weights
    (`moe.disaggregated.weights.split_weights`) with equal bits; adapters are merged first.

    Args:
      weights: on the mesh of `model`, of training.
      experts: expert placement of each layer with experts.
    """
    in_order, config = _merged_in_layer_order(weights, model)
    # Blocks: updates donate the buffers that are being read.
    return jax.block_until_ready(split_weights(in_order, config, mesh, experts))


def reshard(weights: Transformer[Array], model: Model, target: FoldedMesh) -> Transformer[Array]:
    """Reshards weights from the mesh of `model` to `target`, with equal bits; adapters are merged
    (`moe.adapters.merge_adapters`), and on the same mesh weights without adapters are shared.

    Args:
      target: over the same devices, in the same order, or over other devices of the process.
    """
    model = model if has_adapters(weights) else model.without_adapters()
    if not are_disjoint(model.mesh, target):
        leaves, structure = jax.tree.flatten(weights)
        plain, plain_structure = jax.tree.flatten(without_adapters(weights))
        is_shared = _is_shared(weights, model, target)
        moved = iter(_resharding(model, target, is_shared)(leaves, structure))
        pairs = zip(plain, is_shared, strict=True)
        return plain_structure.unflatten([x if shared else next(moved) for x, shared in pairs])
    in_order, config = _merged_in_layer_order(weights, model)
    target_shardings = placement.shardings(Model(without_fsdp(config), target))
    # Blocks: updates donate the buffers that are being read.
    return jax.block_until_ready(jax.device_put(in_order, target_shardings))


def _merged_in_layer_order(
    weights: Transformer[Array], model: Model
) -> tuple[Transformer[Array], ModelConfig]:
    """Weights on their mesh without adapters and in the order of the layers, and their network."""
    config, mesh = model.config.without_adapters(), model.mesh
    if has_adapters(weights):
        # Merged before they are moved, so that only the merged weights are.
        mesh = placement.without_chunks(model).mesh
        weights = reshard(weights, model, mesh)
    return placement.in_layer_order(weights, mesh, axis_sizes(config)["layer"]), config


def _is_shared(weights: Transformer[Array], model: Model, target: FoldedMesh) -> tuple[bool, ...]:
    """True for each weight of a network with adapters that has none and stays as it is sharded."""

    def is_shared(leaf: Any, sharding: Sharding) -> bool:
        return not is_adapted(leaf) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)

    moves = model.mesh != target or not has_adapters(weights)
    shared = jax.tree.map(
        lambda sharding, leaf: not moves and is_shared(leaf, sharding),
        _rollout_shardings(model, target),
        weights,
    )
    return tuple(jax.tree.leaves(shared))


def _rollout_shardings(model: Model, target: FoldedMesh) -> Transformer[NamedSharding]:
    rollout_config = without_fsdp(model.config.without_adapters())
    return placement.shardings(Model(rollout_config, target))


@cache
def _resharding(
    model: Model, target: FoldedMesh, is_shared: tuple[bool, ...]
) -> Callable[[list[Array], Any], list[Array]]:
    """Compiled function that reshards the weights that are not shared by XLA's collectives between
    the devices; if the model has adapters, they are merged."""
    config = model.config

    def select(tree: Any) -> list[Any]:
        leaves = zip(jax.tree.leaves(tree), is_shared, strict=True)
        return [leaf for leaf, shared in leaves if not shared]

    shardings = select(_rollout_shardings(model, target))

    def move(leaves: list[Array], structure: Any) -> list[Array]:
        num_layers = axis_sizes(config)["layer"]
        in_order = placement.in_layer_order(structure.unflatten(leaves), model.mesh, num_layers)
        if config.lora is not None:
            in_order = merge_adapters(in_order, table(config))
        return select(placement.in_chunks(in_order, target))

    return jit_onto(move, shardings, static_argnums=1)


def without_fsdp(config: ModelConfig) -> ModelConfig:
    """Config of the rollout without FSDP: every decoding step reads all weights."""
    return replace(config, execution=replace(config.execution, fsdp=False))
