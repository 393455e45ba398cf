"""Where each weight lives on a mesh."""

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
    """Where each weight lives on `mesh`, stored as `in_rounds` says.

    A head whose columns do not divide by ``tp`` stays whole: no layout can choose the vocabulary.

    Raises:
      ValueError: when an axis does not divide by the devices it is spread over.
    """
    rules, sizes, rounds = dict(weight_rules(mesh)), axis_sizes(config), mesh.layout.vpp
    if sizes["logit"] % mesh.size(mesh.tp):
        del rules["logit"]
    if sizes["layer"] % (mesh.size(mesh.pp) * rounds):
        raise ValueError(
            f"num_layers={sizes['layer']} cannot be cut into {mesh.size(mesh.pp)} pipeline stages "
            f"x {rounds} chunks (layout {mesh.layout}): choose a pp and a vpp whose product "
            "divides it."
        )
    for axis, atoms in rules.items():
        if sizes[axis] % mesh.size(atoms):
            raise ValueError(
                f"the axis {axis!r} of size {sizes[axis]} cannot be split over {mesh.size(atoms)} "
                f"devices (layout {mesh.layout}): choose a layout whose size divides it."
            )

    def place(weight: Weight) -> PartitionSpec:
        stacked = rounds > 1 and weight.axes.startswith("layer ")
        return partition_spec(f"round {weight.axes}" if stacked else weight.axes, rules)

    return jax.tree.map(place, table(config))


def parts(config: ModelConfig, mesh: FoldedMesh) -> Transformer[PartitionSpec]:
    """Where the optimiser state of each weight lives, and under `Execution.fsdp` the weight."""

    def place(spec: PartitionSpec, shape: jax.ShapeDtypeStruct, first: int) -> PartitionSpec:
        return zero.parts(spec, shape.shape, mesh, first)

    return _each_cut(place, config, mesh)


def cuts(config: ModelConfig, mesh: FoldedMesh) -> Transformer[zero.Cut]:
    """How each weight is cut into the parts of `parts`."""

    def cut(spec: PartitionSpec, shape: jax.ShapeDtypeStruct, first: int) -> zero.Cut:
        return zero.cut_of(spec, shape.shape, mesh, first)

    return _each_cut(cut, config, mesh)


def _each_cut(
    of: Callable[[PartitionSpec, jax.ShapeDtypeStruct, int], Leaf],
    config: ModelConfig,
    mesh: FoldedMesh,
) -> Transformer[Leaf]:
    """`of` the place of each weight, its shape as it is stored, and how many dimensions in front
    stay whole: those of the stack of layers where layers are joined one by one."""
    stored = jax.eval_shape(lambda weights: in_rounds(weights, mesh), shapes(config))
    stacked = (1 if mesh.layout.vpp == 1 else 2) if config.execution.fsdp else 0
    first = replace(
        jax.tree.map(lambda _: 0, stored), layers=jax.tree.map(lambda _: stacked, stored.layers)
    )
    return jax.tree.map(of, specs(config, mesh), stored, first)


def in_rounds(weights: Transformer[jax.Array], mesh: FoldedMesh) -> Transformer[jax.Array]:
    """Weights as they are stored on `mesh`: ``[layer, ...]`` or, where its pipeline stages have
    several chunks, ``[round, layer / vpp, ...]``.

    The chunks of a stage are not neighbours; spread along the second axis, they lie together on it.
    Made of reshapes, inverted by `in_order`.
    """
    rounds = mesh.layout.vpp
    if rounds == 1:
        return weights
    layers = jax.tree.map(lambda x: x.reshape(rounds, -1, *x.shape[1:]), weights.layers)
    return replace(weights, layers=layers)


def in_order(weights: Transformer[jax.Array], mesh: FoldedMesh) -> Transformer[jax.Array]:
    """Weights stored on `mesh` with all layers in one axis, as every other layout knows them."""
    if mesh.layout.vpp == 1:
        return weights
    layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), weights.layers)
    return replace(weights, layers=layers)


def kept(config: ModelConfig, mesh: FoldedMesh) -> Transformer[PartitionSpec]:
    """Where weights are between updates: by `specs`, under `Execution.fsdp` by `parts`."""
    return (parts if config.execution.fsdp else specs)(config, mesh)


def shardings(config: ModelConfig, mesh: FoldedMesh) -> Transformer[NamedSharding]:
    """`kept` on the devices of `mesh`."""
    if not isinstance(mesh.mesh, jax.sharding.Mesh):
        raise ValueError("shardings need real devices: fold the layout over some.")
    return jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), kept(config, mesh))
