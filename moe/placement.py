"""Where each weight lives on a mesh: PartitionSpecs by named axes, and their shards for ZeRO."""

from collections.abc import Callable
from dataclasses import replace

import jax
from jax.sharding import NamedSharding, PartitionSpec

from moe.config import ModelConfig
from moe.weights import Leaf, Transformer, Weight, axis_sizes, shapes, table
from sharding import zero
from sharding.folding import FoldedMesh
from sharding.rules import partition_spec, weight_rules


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
    if sizes["layer"] % (mesh.size(mesh.pp) * num_chunks):
        raise ValueError(
            f"num_layers={sizes['layer']} cannot be cut into {mesh.size(mesh.pp)} pipeline stages "
            f"x {num_chunks} chunks (layout {mesh.layout}): choose a pp and a vpp whose product "
            "divides it."
        )
    for axis, atoms in rules.items():
        if sizes[axis] % mesh.size(atoms):
            raise ValueError(
                f"the axis {axis!r} of size {sizes[axis]} cannot be split over {mesh.size(atoms)} "
                f"devices (layout {mesh.layout}): choose a layout whose size divides it."
            )

    def spec_of(weight: Weight) -> PartitionSpec:
        stacked = num_chunks > 1 and weight.axes.startswith("layer ")
        return partition_spec(f"chunk {weight.axes}" if stacked else weight.axes, rules)

    return jax.tree.map(spec_of, table(config))


def shard_specs(config: ModelConfig, mesh: FoldedMesh) -> Transformer[PartitionSpec]:
    """Where the optimizer state of each weight lives (ZeRO-1), and under `Execution.fsdp` the
    weight (ZeRO-3)."""

    def spec_of(spec: PartitionSpec, shape: jax.ShapeDtypeStruct, first: int) -> PartitionSpec:
        return zero.shard_spec(spec, shape.shape, mesh, first)

    return _each_weight(spec_of, config, mesh)


def shard_dims(config: ModelConfig, mesh: FoldedMesh) -> Transformer[zero.ShardDim]:
    """How each weight is cut into the shards of `shard_specs`."""

    def dim_of(spec: PartitionSpec, shape: jax.ShapeDtypeStruct, first: int) -> zero.ShardDim:
        return zero.shard_dim(spec, shape.shape, mesh, first)

    return _each_weight(dim_of, config, mesh)


def _each_weight(
    of: Callable[[PartitionSpec, jax.ShapeDtypeStruct, int], Leaf],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Transformer[Leaf]:
    """`of` the place of each weight, its shape as it is stored, and how many dimensions in front
    stay whole: those of the stack of layers where layers are unsharded one by one."""
    stored = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config))
    # Cut along the stack, whole layers would lie on one device each: no layer could be joined
    # alone.
    stacked = (1 if mesh.layout.vpp == 1 else 2) if config.execution.fsdp else 0
    first = replace(
        jax.tree.map(lambda _: 0, stored), layers=jax.tree.map(lambda _: stacked, stored.layers)
    )
    return jax.tree.map(of, specs(config, mesh), stored, first)


def in_chunks(weights: Transformer[jax.Array], mesh: FoldedMesh) -> Transformer[jax.Array]:
    """Weights as they are stored on `mesh`: ``[layer, ...]`` or, where its pipeline stages have
    several model chunks, ``[chunk, layer / vpp, ...]``.

    The chunks of a stage are not neighbours; spread along the second axis, they lie together on it.
    Made of reshapes, inverted by `in_layer_order`.
    """
    num_chunks = mesh.layout.vpp
    if num_chunks == 1:
        return weights
    layers = jax.tree.map(lambda x: x.reshape(num_chunks, -1, *x.shape[1:]), weights.layers)
    return replace(weights, layers=layers)


def in_layer_order(weights: Transformer[jax.Array], mesh: FoldedMesh) -> Transformer[jax.Array]:
    """Weights stored on `mesh` with all layers in one axis, as every other layout knows them."""
    if mesh.layout.vpp == 1:
        return weights
    layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), weights.layers)
    return replace(weights, layers=layers)


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
