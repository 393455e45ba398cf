"""Resharding of the policy from the training mesh to the rollout mesh, which may have another
layout or other devices."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import ref

import jax
from jaxtyping import Array

from moe import placement
from moe.adapters.trees import has_adapters, merge_adapters, without_adapters
from moe.config import ModelConfig
from moe.disaggregated.split import devices_of
from moe.weights import Transformer, axis_sizes, table
from sharding.folding import FoldedMesh, Layout, fold


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
    """Mesh of decoding on separate devices: those of this process after the ones of `training`.

    Args:
      text: the requested layout; None is data parallelism over all of them.
      num_devices: of devices.

    Raises:
      ValueError: for a layout that cannot decode, or one of another number of devices, and where
        there are too few.
    """
    layout = Layout.parse(f"dp{num_devices}" if text is None else text)
    if layout.pp > 1 or layout.cp > 1 or layout.num_devices != num_devices:
        raise ValueError(
            f"rollout layout {text!r} does not fit rollout_devices={num_devices}: its sizes must "
            f"have that product, without pp and cp, for example 'dp{num_devices}'."
        )
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
    return fold(layout, devices[learning : learning + num_devices])


def are_disjoint(training: FoldedMesh, rollout: FoldedMesh) -> bool:
    """True if the two meshes share no device."""
    return {*devices_of(training)}.isdisjoint(devices_of(rollout))


class RolloutPolicy:
    """Copy of the policy on the rollout mesh, updated when the weights have changed.

    Where both meshes are equal it is the trained policy itself, unless that has adapters: they are
    merged once per change, in the compiled function that moves the weights. Otherwise the weights
    are moved once per change, in their dtypes: a device receives at most its shard on the rollout
    mesh, ``itemsize x elements / devices a weight is split over there`` bytes, less what it holds
    already.

    Args:
      config: the policy network.
      training: the mesh of the weights that `sync` receives.
      rollout: the mesh that decodes, over the same devices in the same order or over others.
    """

    def __init__(self, config: ModelConfig, training: FoldedMesh, rollout: FoldedMesh):
        self._meshes = config, training, rollout
        # A weak reference: it must not keep old weights alive.
        self._source: ref[Transformer[Array]] | None = None
        self._resharded: Transformer[Array] | None = None

    def sync(self, weights: Transformer[Array]) -> Transformer[Array]:
        """Policy `weights` on the rollout mesh, stored as `moe.placement.in_chunks` describes."""
        _, training, rollout = self._meshes
        if rollout == training and not has_adapters(weights):
            return weights
        source = None if self._source is None else self._source()
        if self._resharded is None or source is not weights:
            self.release()  # old and new need not fit in memory together
            self._resharded = reshard(weights, *self._meshes)
            self._source = ref(weights)
        return self._resharded

    def release(self) -> None:
        """Frees the copy's memory."""
        self._source = self._resharded = None


def reshard(
    weights: Transformer[Array], config: ModelConfig, source: FoldedMesh, target: FoldedMesh
) -> Transformer[Array]:
    """Reshards weights from `source` to `target`, with equal bits; adapters are merged
    (`moe.adapters.trees.merge_adapters`).

    Args:
      config: the network of the weights.
      target: over the devices of `source`, in the same order, or over other devices of the
        process.
    """
    config = config if has_adapters(weights) else config.without_adapters()
    if not are_disjoint(source, target):
        leaves, structure = jax.tree.flatten(weights)
        moved = _resharding(config, source, target)(leaves, structure)
        return jax.tree.unflatten(jax.tree.structure(without_adapters(weights)), moved)
    if config.lora is not None:
        # Merged on the source, so that only the merged weights are moved.
        plain = placement.without_chunks(config, source)
        weights = reshard(weights, config, source, plain)
        source, config = plain, config.without_adapters()
    in_order = placement.in_layer_order(weights, source, axis_sizes(config)["layer"])
    target_shardings = placement.shardings(_without_fsdp(config), target)
    # Blocks: updates donate the buffers that are being read.
    return jax.block_until_ready(jax.device_put(in_order, target_shardings))


@cache
def _resharding(
    config: ModelConfig, source: FoldedMesh, target: FoldedMesh
) -> Callable[[list[Array], Any], list[Array]]:
    """Compiled function that reshards all weights by XLA's collectives between the devices.

    Args:
      config: with adapters if they are to be merged.
    """
    rollout_config = _without_fsdp(config.without_adapters())
    shardings = jax.tree.leaves(placement.shardings(rollout_config, target))

    def move(leaves: list[Array], structure: Any) -> list[Array]:
        num_layers = axis_sizes(config)["layer"]
        in_order = placement.in_layer_order(structure.unflatten(leaves), source, num_layers)
        if config.lora is not None:
            in_order = merge_adapters(in_order, table(config))
        return jax.tree.leaves(placement.in_chunks(in_order, target))

    return jax.jit(move, out_shardings=shardings, static_argnums=1)


def _without_fsdp(config: ModelConfig) -> ModelConfig:
    """Config of the rollout without FSDP: every decoding step reads all weights."""
    return replace(config, execution=replace(config.execution, fsdp=False))
