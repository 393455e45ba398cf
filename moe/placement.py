"""Where each weight lives on a mesh: PartitionSpecs by named axes, and their shards for ZeRO."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moe.architecture.delta import delta_layers
from moe.config import ModelConfig
from moe.layers import chunks
from moe.weights import Leaf, Transformer, Weight, axis_sizes, shapes, table
from sharding import zero
from sharding.folding import FoldedMesh
from sharding.rules import partition_spec, weight_rules

CUT_INTO_CHUNKS = ("layer", "attention_layer", "delta_layer")
"""Axes of layers that the stages of a pipeline share."""


def specs(config: ModelConfig, mesh: FoldedMesh) -> Transformer[PartitionSpec]:
    """Where each weight lives on `mesh`, stored as `in_chunks` says.

    Embedding and head stay whole where ``tp`` does not divide the vocabulary, which no layout can
    choose.

    Raises:
      ValueError: when an axis does not divide by the devices it is spread over.
    """
    rules, sizes, num_chunks = dict(weight_rules(mesh)), axis_sizes(config), mesh.layout.vpp
    # The only axis that may stay whole: a vocabulary is given, every other size can be chosen.
    if sizes["vocab"] % mesh.size(mesh.tp):
        del rules["vocab"]
    # Stored with padding where stages are uneven.
    depths = chunks.layers_of_chunks(sizes["layer"], mesh)
    sizes["layer"] = len(depths) * max(depths)
    chunks.check_delta_layers(config.num_layers, delta_layers(config), mesh)
    for axis, atoms in rules.items():
        if sizes.get(axis, 0) % mesh.size(atoms):
            raise ValueError(
                f"the axis {axis!r} of size {sizes[axis]} cannot be split over {mesh.size(atoms)} "
                f"devices (layout {mesh.layout}): choose a layout whose size divides it."
            )

    def spec_of(weight: Weight) -> PartitionSpec:
        cut = num_chunks > 1 and weight.axes.split()[0] in CUT_INTO_CHUNKS
        return partition_spec(f"chunk {weight.axes}" if cut else weight.axes, rules)

    return jax.tree.map(spec_of, table(config))


def shard_specs(config: ModelConfig, mesh: FoldedMesh) -> Transformer[PartitionSpec]:
    """Where the optimizer state of each weight lives (ZeRO-1), and under `Execution.fsdp` the
    weight (ZeRO-3)."""

    def spec_of(spec: PartitionSpec, shape: jax.ShapeDtypeStruct, first: int) -> PartitionSpec:
        return zero.shard_spec(spec, shape.shape, mesh, first)

    return _each_weight(spec_of, config, mesh)


def shard_dims(
    config: ModelConfig, mesh: FoldedMesh, wire: str = "float32"
) -> Transformer[zero.ShardDim]:
    """How each weight is cut into the shards of `shard_specs`, gradients across sent in `wire`."""

    def dim_of(spec: PartitionSpec, shape: jax.ShapeDtypeStruct, first: int) -> zero.ShardDim:
        return zero.shard_dim(spec, shape.shape, mesh, first, wire)

    return _each_weight(dim_of, config, mesh)


def _each_weight(
    of: Callable[[PartitionSpec, jax.ShapeDtypeStruct, int], Leaf],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Transformer[Leaf]:
    """`of` the place of each weight, its shape as it is stored, and how many dimensions in front
    stay whole: those of the stack of layers where layers are unsharded one by one."""
    # Before anything is cut: a layout that cannot be had is refused by what it lacks.
    whole_specs = specs(config, mesh)
    stored = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config))
    # Cut along the stack, whole layers would lie on one device each: no layer could be joined
    # alone.
    whole = (1 if mesh.layout.vpp == 1 else 2) if config.execution.fsdp else 0
    first = replace(
        jax.tree.map(lambda _: 0, stored), layers=jax.tree.map(lambda _: whole, stored.layers)
    )
    return jax.tree.map(of, whole_specs, stored, first)


def in_chunks(weights: Transformer[jax.Array], mesh: FoldedMesh) -> Transformer[jax.Array]:
    """Weights as they are stored on `mesh`: ``[layer, ...]`` or, where its pipeline stages have
    several model chunks, ``[chunk, layer / vpp, ...]``. Chunks that are a layer shorter than the
    others end with zeros (`moe.layers.chunks`).

    The chunks of a stage are not neighbours; spread along the second axis, they lie together on it.
    Inverted by `in_layer_order`.
    """
    return replace(weights, layers=jax.tree.map(partial(stacked, mesh), weights.layers))


def stacked(mesh: FoldedMesh, x: Any) -> Any:
    """``[layer, ...]``, of NumPy or JAX, as `in_chunks` stores it."""
    num_layers, num_chunks = x.shape[0], mesh.layout.vpp
    if not chunks.is_even(num_layers, mesh):
        depth = chunks.stored_depth(num_layers, mesh)
        source = np.full(mesh.layout.pp * num_chunks * depth, -1)
        source[chunks.places(num_layers, mesh)] = np.arange(num_layers)
        there = (source >= 0).reshape(-1, *(1,) * (x.ndim - 1))
        x = jnp.where(there, x[np.maximum(source, 0)], jnp.zeros((), x.dtype))
    return x if num_chunks == 1 else x.reshape(num_chunks, -1, *x.shape[1:])


def in_layer_order(
    weights: Transformer[jax.Array], mesh: FoldedMesh, num_layers: int | None = None
) -> Transformer[jax.Array]:
    """Weights stored on `mesh` with all layers in one axis, as every other layout knows them.

    Args:
      num_layers: of the stack, without the dense first ones; None where all stages have as many.
    """

    def in_order(x: Any) -> Any:
        x = x if mesh.layout.vpp == 1 else x.reshape(-1, *x.shape[2:])
        if num_layers is None or chunks.is_even(num_layers, mesh):
            return x
        return x[np.asarray(chunks.places(num_layers, mesh))]

    return replace(weights, layers=jax.tree.map(in_order, weights.layers))


def without_chunks(config: ModelConfig, mesh: FoldedMesh) -> FoldedMesh:
    """`mesh` for weights whose layers lie in one axis, in order and without padding, as other
    layouts know them: its stages hold consecutive layers or, where those would not be equally many,
    each of them all."""
    plain = replace(mesh, layout=replace(mesh.layout, vpp=1))
    if chunks.is_even(axis_sizes(config)["layer"], plain):
        return plain
    return replace(plain, layout=replace(plain.layout, pp=1), pp=())


def stored_specs(config: ModelConfig, mesh: FoldedMesh) -> Transformer[PartitionSpec]:
    """Where weights are between updates: by `specs`, under `Execution.fsdp` by `shard_specs`."""
    return (shard_specs if config.execution.fsdp else specs)(config, mesh)


def shardings(config: ModelConfig, mesh: FoldedMesh) -> Transformer[NamedSharding]:
    """`stored_specs` on the devices of `mesh`."""
    return _on_devices(stored_specs(config, mesh), mesh)


def shard_shardings(config: ModelConfig, mesh: FoldedMesh) -> Transformer[NamedSharding]:
    """`shard_specs` on the devices of `mesh`."""
    return _on_devices(shard_specs(config, mesh), mesh)


def _on_devices(places: Transformer[PartitionSpec], mesh: FoldedMesh) -> Transformer[NamedSharding]:
    if not isinstance(mesh.mesh, jax.sharding.Mesh):
        raise ValueError("shardings need real devices: fold the layout over some.")
    return jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), places)
