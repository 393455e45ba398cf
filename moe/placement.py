"""Placement of the weights on a mesh: their PartitionSpecs by named axes, the specs of ZeRO shards,
and the split of the layers into the model chunks of a pipeline.

The layers after the leading dense ones are split into ``pp x vpp`` chunks that differ by one layer
at most. Shards of an array have equal size: all chunks are stored with the depth of the deepest,
and the others end with a layer of zeros that never runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from moe.architecture.attention import delta_layers
from moe.config import Model
from moe.weights import Leaf, Transformer, Weight, axis_sizes, shapes, table
from sharding import zero
from sharding.folding import FoldedMesh
from sharding.folding.mesh import partition_spec, weight_rules
from sharding.sharded_jit import named_shardings

CHUNKED_AXES = ("layer", "attention_layer", "delta_layer")
"""Axes of layers that the stages of a pipeline share."""


def layers_per_chunk(num_layers: int, mesh: FoldedMesh) -> tuple[int, ...]:
    """Number of layers of each model chunk, from the first to the last.

    The shallower chunks are at both ends, half of them at each, as embedding and head are there.

    Raises:
      ValueError: if a chunk would have no layer.
    """
    chunks = mesh.layout.pp * mesh.layout.vpp
    if num_layers < chunks:
        raise ValueError(
            f"num_layers={num_layers} cannot be split into {mesh.layout.pp} pipeline stages x "
            f"{mesh.layout.vpp} chunks (layout {mesh.layout}) of at least one layer: choose pp x "
            "vpp of at most num_layers."
        )
    depth = stored_depth(num_layers, mesh)
    shallow = chunks * depth - num_layers
    first, last = shallow // 2, chunks - (shallow - shallow // 2)
    return tuple(depth if first <= chunk < last else depth - 1 for chunk in range(chunks))


def stored_depth(num_layers: int, mesh: FoldedMesh) -> int:
    """Number of layers that each model chunk is stored with, padding included."""
    return -(-num_layers // (mesh.layout.pp * mesh.layout.vpp))


def is_even(num_layers: int, mesh: FoldedMesh) -> bool:
    """True if all chunks have the same number of layers."""
    return num_layers % (mesh.layout.pp * mesh.layout.vpp) == 0


def check_delta_layers(num_layers: int, delta_layers: Sequence[int], mesh: FoldedMesh) -> None:
    """Checks that a layout supports layers with Gated DeltaNet, which needs whole sequences and,
    as all pipeline stages run one program, chunks with the same layer types.

    Raises:
      ValueError: if ``cp`` splits sequences, or chunks differ in which of their layers have it.
    """
    num_chunks = mesh.layout.pp * mesh.layout.vpp
    if delta_layers and mesh.layout.cp > 1:
        raise ValueError(
            f"layout {mesh.layout}: Gated DeltaNet needs full sequences, which cp splits: "
            "choose a layout with cp=1."
        )
    if not delta_layers or num_chunks == 1:
        return
    depth = stored_depth(num_layers, mesh)
    delta_positions = {layer % depth for layer in delta_layers}
    expected = [layer for layer in range(num_layers) if layer % depth in delta_positions]
    if num_layers % num_chunks or list(delta_layers) != expected:
        raise ValueError(
            f"layout {mesh.layout} splits num_layers={num_layers} into {num_chunks} chunks with "
            f"different layer types (Gated DeltaNet: {tuple(delta_layers)}): choose pp and vpp so "
            "that all chunks have the same, for example pp=1."
        )


def first_layers_of_chunks(num_layers: int, mesh: FoldedMesh) -> tuple[int, ...]:
    """Index of the first layer of each model chunk."""
    return (0, *accumulate(layers_per_chunk(num_layers, mesh)))[:-1]


def specs(model: Model) -> Transformer[PartitionSpec]:
    """PartitionSpec of each weight on the mesh, stored as by `in_chunks`.

    Embedding and head are replicated if ``tp`` does not divide the vocabulary, whose size is given
    and not a choice of the layout.

    Raises:
      ValueError: if an axis is not divisible by the number of devices that it is sharded over, and
        for ``ep`` or ``etp`` of a network without experts.
    """
    config, mesh = model.config, model.mesh
    mesh.layout.check_experts(config.num_experts)
    rules, sizes, num_chunks = dict(weight_rules(mesh)), axis_sizes(config), mesh.layout.vpp
    # The only axis that may be replicated: a vocabulary is given, all other sizes can be chosen.
    if sizes["vocab"] % mesh.size(mesh.tp):
        del rules["vocab"]
    # Stored with padding where stages are uneven.
    depths = layers_per_chunk(sizes["layer"], mesh)
    sizes["layer"] = len(depths) * max(depths)
    check_delta_layers(config.num_layers, delta_layers(config), mesh)
    for axis, atoms in rules.items():
        if sizes.get(axis, 0) % mesh.size(atoms):
            raise ValueError(
                f"the axis {axis!r} of size {sizes[axis]} cannot be split over {mesh.size(atoms)} "
                f"devices (layout {mesh.layout}): choose a layout whose size divides it."
            )

    def spec_of(weight: Weight) -> PartitionSpec:
        cut = num_chunks > 1 and weight.axes.split()[0] in CHUNKED_AXES
        return partition_spec(f"chunk {weight.axes}" if cut else weight.axes, rules)

    return jax.tree.map(spec_of, table(config))


def shard_specs(model: Model) -> Transformer[PartitionSpec]:
    """PartitionSpec of the optimizer state of each weight (ZeRO-1), and under `Execution.fsdp` of
    the weight (ZeRO-3)."""
    return _map_weights(zero.shard_spec, model)


def shard_dims(model: Model, gradient_dtype: str = "float32") -> Transformer[zero.ShardDim]:
    """Shard dimension of each weight for `shard_specs`; gradients across nodes are sent in the
    dtype `gradient_dtype`."""
    return _map_weights(partial(zero.shard_dim, comm_dtype=gradient_dtype), model)


def _map_weights(
    function: Callable[[PartitionSpec, tuple[int, ...], FoldedMesh, int], Leaf], model: Model
) -> Transformer[Leaf]:
    """Maps `function` over the PartitionSpec of each weight, its shape as stored, the mesh, and the
    number of leading dimensions that must not be sharded: the dimensions of the stack of layers, if
    layers are unsharded one by one."""
    # First, so that an unsupported layout raises with its own reason.
    mesh = model.mesh
    full_specs = specs(model)
    stored = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(model.config))
    # Sharded along the stack, each device would have whole layers, and no layer could be gathered
    # alone.
    stack_dims = (1 if mesh.layout.vpp == 1 else 2) if model.config.execution.fsdp else 0
    first = replace(
        jax.tree.map(lambda _: 0, stored), layers=jax.tree.map(lambda _: stack_dims, stored.layers)
    )
    return jax.tree.map(
        lambda spec, leaf, first: function(spec, leaf.shape, mesh, first), full_specs, stored, first
    )


def local_bytes(shapes: Any, partition_specs: Any, mesh: FoldedMesh) -> Any:
    """Bytes of each array of a tree on one device.

    Args:
      shapes: with shapes and dtypes.
      partition_specs: a PartitionSpec for each.
    """

    def bytes_of(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        sharding = NamedSharding(mesh.mesh, spec)
        return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return jax.tree.map(bytes_of, shapes, partition_specs)


def in_chunks(weights: Transformer[jax.Array], mesh: FoldedMesh) -> Transformer[jax.Array]:
    """Reshapes weights to how they are stored on `mesh`: ``[layer, ...]`` or, if its pipeline
    stages have multiple model chunks (interleaved schedule), ``[chunk, layer / vpp, ...]``. Chunks
    that are a layer shorter than the others end with zeros.

    The chunks of a stage are not neighbours in the network; sharding the second axis places them
    together on the stage. Inverse of `in_layer_order`.
    """
    return replace(weights, layers=jax.tree.map(partial(stack_chunks, mesh), weights.layers))


def stack_chunks(mesh: FoldedMesh, x: Any) -> Any:
    """Reshapes ``[layer, ...]``, a NumPy or JAX array, to the layout of `in_chunks`."""
    num_layers, num_chunks = x.shape[0], mesh.layout.vpp
    if not is_even(num_layers, mesh):
        depth = stored_depth(num_layers, mesh)
        padding = jnp.zeros((1, *x.shape[1:]), x.dtype)
        parts, first = [], 0
        for layers in layers_per_chunk(num_layers, mesh):
            parts += [x[first : first + layers], padding[: depth - layers]]
            first += layers
        x = jnp.concatenate(parts)
    return x if num_chunks == 1 else x.reshape(num_chunks, -1, *x.shape[1:])


def without_padding(x: Any, num_layers: int, mesh: FoldedMesh) -> Any:
    """``[layer, ...]`` of chunks one after the other, without the zeros that shorter ones end with.

    By slices: JAX 0.11 ends the process when it partitions a gather over layers that are sharded.
    """
    if is_even(num_layers, mesh):
        return x
    depth, layers = stored_depth(num_layers, mesh), layers_per_chunk(num_layers, mesh)
    return jnp.concatenate([x[chunk * depth :][:count] for chunk, count in enumerate(layers)])


def in_layer_order(
    weights: Transformer[jax.Array], mesh: FoldedMesh, num_layers: int | None = None
) -> Transformer[jax.Array]:
    """Reshapes weights stored on `mesh` to one axis of layers in order, as in every other layout.

    Args:
      num_layers: layers of the stack, without the leading dense ones; None if all stages have
        equally many.
    """

    def in_order(x: Any) -> Any:
        x = x if mesh.layout.vpp == 1 else x.reshape(-1, *x.shape[2:])
        return x if num_layers is None else without_padding(x, num_layers, mesh)

    return replace(weights, layers=jax.tree.map(in_order, weights.layers))


def without_chunks(model: Model) -> Model:
    """The model on a mesh for weights with one axis of layers, in order and without padding, as in
    other layouts: its stages have consecutive layers or, if these would not be equally many, all
    layers."""
    plain = replace(model.mesh, layout=replace(model.mesh.layout, vpp=1))
    if not is_even(axis_sizes(model.config)["layer"], plain):
        plain = replace(plain, layout=replace(plain.layout, pp=1), pp=())
    return replace(model, mesh=plain)


def stored_specs(model: Model) -> Transformer[PartitionSpec]:
    """PartitionSpecs of weights between updates: `specs`, or `shard_specs` under
    `Execution.fsdp`."""
    return (shard_specs if model.config.execution.fsdp else specs)(model)


def shardings(model: Model) -> Transformer[NamedSharding]:
    """`stored_specs` on the devices of the mesh."""
    return named_shardings(stored_specs(model), model.mesh)


def shard_shardings(model: Model) -> Transformer[NamedSharding]:
    """`shard_specs` on the devices of the mesh."""
    return named_shardings(shard_specs(model), model.mesh)
