"""The policy where it decodes: the rollout may have a layout of its own over the same devices."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import ref

import jax
from jaxtyping import Array

from moe import placement
from moe.adapters.trees import has_adapters, merged, without_adapters
from moe.config import ModelConfig
from moe.disaggregated.split import devices_of
from moe.weights import Transformer, axis_sizes, table
from sharding.folding import FoldedMesh, Layout, fold


def rollout_layout(training: Layout) -> Layout:
    """The layout that decoding takes where none is asked for.

    Decoding needs all layers and whole sequences on every device, so ``pp`` and ``cp`` become part
    of ``dp``, which reads weights more often and communicates least; ``tp``, ``ep`` and ``etp``
    stay, and ``edp`` grows. Without ``pp`` and ``cp`` it is the layout of training.
    """
    dp = training.dp * training.cp * training.pp
    return replace(training, dp=dp, cp=1, pp=1, vpp=1)


def rollout_mesh(text: str | None, training: FoldedMesh) -> FoldedMesh:
    """The mesh that completions are sampled on, over the devices of `training` in their order.

    Args:
      text: the layout asked for; None derives it.

    Raises:
      ValueError: for a layout that cannot decode, or one of another number of devices.
    """
    layout = rollout_layout(training.layout) if text is None else Layout.parse(text)
    if layout.pp > 1 or layout.cp > 1:
        raise ValueError(
            f"rollout layout {text!r}: decoding needs all layers and whole sequences on every "
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


def mesh_apart(text: str | None, number: int, training: FoldedMesh) -> FoldedMesh:
    """The mesh that completions are sampled on, over devices of this process after those of
    `training`.

    Args:
      text: the layout asked for; None decodes rows apart on each device.
      number: of devices.

    Raises:
      ValueError: for a layout that cannot decode, or one of another number of devices, and where
        there are not so many.
    """
    layout = Layout.parse(f"dp{number}" if text is None else text)
    if layout.pp > 1 or layout.cp > 1 or layout.num_devices != number:
        raise ValueError(
            f"rollout layout {text!r} cannot be that of rollout_devices={number}: its sizes must "
            f"have that product, without pp and cp, for example 'dp{number}'."
        )
    learning, devices = training.layout.num_devices, jax.devices()
    if jax.process_count() > 1:
        raise ValueError(
            f"rollout_devices={number} are devices of one process, and the run has "
            f"{jax.process_count()}: leave it out, to sample and learn by turns."
        )
    if len(devices) < learning + number:
        raise ValueError(
            f"rollout_devices={number} beside the {learning} of layout "
            f"{str(training.layout)!r} are {learning + number} devices and there are "
            f"{len(devices)}: choose fewer, or --devices {learning + number} to have as many fake "
            "ones on a CPU."
        )
    return fold(layout, devices[learning : learning + number])


def apart(training: FoldedMesh, rollout: FoldedMesh) -> bool:
    """Whether the two have devices of their own."""
    return {*devices_of(training)}.isdisjoint(devices_of(rollout))


class RolloutPolicy:
    """The policy on the mesh that decodes, made anew when it has changed.

    Where both meshes are the same it is the very policy that trains, unless that has adapters: they
    are merged once per change, in the program that moves the weights. Otherwise its weights move
    once per change, in the dtypes that they have: a device receives at most its share on the
    rollout's mesh, ``itemsize x elements / devices a weight is split over there`` bytes, less what
    it holds already.

    Args:
      config: the policy network.
      training: the mesh whose weights `of` is given.
      rollout: the mesh that decodes, over the same devices in the same order or over others.
    """

    def __init__(self, config: ModelConfig, training: FoldedMesh, rollout: FoldedMesh):
        self._meshes = config, training, rollout
        # A weak one: remembering what was resharded must not keep old weights alive.
        self._source: ref[Transformer[Array]] | None = None
        self._resharded: Transformer[Array] | None = None

    def of(self, weights: Transformer[Array]) -> Transformer[Array]:
        """The policy `weights`, stored on the rollout's mesh as `moe.placement.in_chunks` says."""
        _, training, rollout = self._meshes
        if rollout == training and not has_adapters(weights):
            return weights
        known = None if self._source is None else self._source()
        if self._resharded is None or known is not weights:
            self.release()  # old and new need not fit beside each other
            self._resharded = reshard(weights, *self._meshes)
            self._source = ref(weights)
        return self._resharded

    def release(self) -> None:
        """Gives up the copy, and so its memory."""
        self._source = self._resharded = None


def reshard(
    weights: Transformer[Array], config: ModelConfig, source: FoldedMesh, target: FoldedMesh
) -> Transformer[Array]:
    """Weights stored on `source` as they are stored on `target`, bit for bit; those with adapters
    merged (`moe.adapters.trees.merged`).

    Args:
      config: the network of the weights.
      target: over the devices of `source`, in the same order, or over other devices of the
        process.
    """
    config = config if has_adapters(weights) else config.without_adapters()
    if not apart(source, target):
        leaves, structure = jax.tree.flatten(weights)
        moved = _resharding(config, source, target)(leaves, structure)
        return jax.tree.unflatten(jax.tree.structure(without_adapters(weights)), moved)
    if config.lora is not None:
        # Merged where they are: what moves is one copy.
        plain = placement.without_chunks(config, source)
        weights = reshard(weights, config, source, plain)
        source, config = plain, config.without_adapters()
    in_order = placement.in_layer_order(weights, source, axis_sizes(config)["layer"])
    whole = placement.shardings(_whole(config), target)
    # Waited for: updates give away the buffers that are being read.
    return jax.block_until_ready(jax.device_put(in_order, whole))


@cache
def _resharding(
    config: ModelConfig, source: FoldedMesh, target: FoldedMesh
) -> Callable[[list[Array], Any], list[Array]]:
    """One program for all weights, which XLA moves by collectives between the devices.

    Args:
      config: with adapters where they are to be merged.
    """
    whole = _whole(config.without_adapters())
    shardings = jax.tree.leaves(placement.shardings(whole, target))

    def move(leaves: list[Array], structure: Any) -> list[Array]:
        num_layers = axis_sizes(config)["layer"]
        in_order = placement.in_layer_order(structure.unflatten(leaves), source, num_layers)
        if config.lora is not None:
            in_order = merged(in_order, table(config))
        return jax.tree.leaves(placement.in_chunks(in_order, target))

    return jax.jit(move, out_shardings=shardings, static_argnums=1)


def _whole(config: ModelConfig) -> ModelConfig:
    """Without parts where they are sampled from: every decoding step reads all weights."""
    return replace(config, execution=replace(config.execution, fsdp=False))
