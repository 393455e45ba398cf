"""Weights of a disaggregated network: each is stored only on the side that uses it, attention or
experts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from flax import struct
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from moe.config import Model, ModelConfig
from moe.disaggregated.placement import Placement, SlotTable, layer_placements
from moe.disaggregated.split import SplitMesh, has_local_devices
from moe.placement import local_bytes, specs
from moe.weights import Experts, Layer, Transformer, cast_shapes, without_layers
from sharding.folding import FoldedMesh
from sharding.sharded_jit import jit_onto, jit_sharded, named_shardings

Leaf = TypeVar("Leaf")


@struct.dataclass
class AttentionHalf(Generic[Leaf]):
    """The attention side's part of a layer with experts: its weights, and the slots of each
    expert."""

    layer: Layer[Leaf]
    slot_table: SlotTable


@struct.dataclass
class SplitWeights(Generic[Leaf]):
    """Unstacked weights of both sides: a record for each layer, so that one compiled program runs
    all layers and copies none out of a stack.

    Attributes:
      rest: embedding, last norm and head, without layers; None in a process without attention
        devices, where `first`, `attention` and `slot_tables` are empty.
      first: the leading dense layers.
      attention: the other layers; their experts are a router and a selection bias only.
      experts: the routed experts of each of those, by the slots of a `Placement`; no router. Empty
        in a process without expert devices.
      slot_tables: for each of those, the table of slots of each expert, replicated over the
        attention devices; empty in a process without them.
    """

    rest: Transformer[Leaf] | None
    first: tuple[Layer[Leaf], ...]
    attention: tuple[Layer[Leaf], ...]
    experts: tuple[Experts[Leaf], ...]
    slot_tables: tuple[SlotTable, ...]

    def attention_half(self, layer: int) -> AttentionHalf[Leaf]:
        """Weights of the attention half of a layer with experts."""
        return AttentionHalf(self.attention[layer], self.slot_tables[layer])


def split_weights(
    weights: Transformer[Any],
    config: ModelConfig,
    mesh: SplitMesh,
    placement: Placement | Sequence[Placement],
) -> SplitWeights[Array]:
    """Copies weights with stacked layers to the two sides, bitwise identical.

    An attention device receives everything but routed experts: ``1 / tp`` of what `moe.placement`
    shards over ``tp``, and the rest in full. An expert device receives its slots, their hidden
    units sharded over ``etp``.

    Args:
      weights: on the host, equal in all processes; or on devices of this one process; or sharded
        over all processes, each of which then gathers one full array after the other.
      placement: one for all layers, or one for each layer with experts.

    Raises:
      ValueError: for a network without experts, and for sizes that do not divide.
    """
    placements = layer_placements(placement, config.num_expert_layers)
    for each in placements:
        check_splits(config, mesh, each)
    rest, first, attention, slot_tables = None, (), (), ()
    # Both sides in all processes: each has a part of what is read.
    attention_weights = _without_experts(weights)
    weight_specs = _without_experts(specs(Model(config, mesh.attention)))
    on_attention = named_shardings(weight_specs, mesh.attention)
    sharded = jax.tree.map(_put_leaf, attention_weights, on_attention)
    if has_local_devices(mesh.attention):
        rest, first, attention = _unstack_attention(Model(config, mesh.attention))(sharded)
        replicated = NamedSharding(mesh.attention.mesh, PartitionSpec())
        tables = tuple(each.slot_table() for each in placements)
        slot_tables = jax.tree.map(lambda x: _put_leaf(x, replicated), tables)
    experts, routed = (), _routed_experts(weights)
    if not all(each.is_identity for each in placements):
        slot_experts = np.stack([each.experts for each in placements])
        layers = np.arange(len(slot_experts))[:, None]
        routed = jax.tree.map(lambda x: x[layers, slot_experts], routed)
    on_experts = named_shardings(expert_specs(mesh.experts, stacked=True), mesh.experts)
    sharded = jax.tree.map(_put_leaf, routed, on_experts)
    if has_local_devices(mesh.experts):
        experts = _unstack_experts(config.num_expert_layers, mesh.experts)(sharded)
    return SplitWeights(rest, first, attention, experts, slot_tables)


def move_experts(
    weights: SplitWeights[Array],
    mesh: SplitMesh,
    before: Sequence[Placement],
    after: Sequence[Placement],
) -> SplitWeights[Array]:
    """Moves experts to other slots, bitwise identical: each slot is copied from the first one that
    held its expert.

    Layers are moved one after the other. Meanwhile each expert device has all experts of the layer
    in memory.

    Args:
      weights: their experts are donated.
      before, after: a placement for each layer, with equally many slots.
    """
    experts, slot_tables = list(weights.experts), list(weights.slot_tables)
    on_attention, on_experts = (
        NamedSharding(side.mesh, PartitionSpec()) for side in (mesh.attention, mesh.experts)
    )
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        if experts:
            sources = [old.slot_experts.index(expert) for expert in new.slot_experts]
            experts[layer] = _gather_program(mesh.experts)(
                experts[layer], _put_leaf(np.array(sources, np.int32), on_experts)
            )
        if slot_tables:
            slot_tables[layer] = jax.tree.map(
                lambda x: _put_leaf(x, on_attention), new.slot_table()
            )
    return replace(weights, experts=tuple(experts), slot_tables=tuple(slot_tables))


@cache
def _gather_program(mesh: FoldedMesh) -> Callable[[Experts[Array], Array], Experts[Array]]:
    """Compiled gather of the experts of a layer by slot index; the old ones are donated."""

    def take(experts: Experts[Array], slots: Array) -> Experts[Array]:
        return jax.tree.map(lambda x: x[slots], experts)

    return jit_onto(take, named_shardings(expert_specs(mesh), mesh), donate_argnums=0)


def check_splits(config: ModelConfig, mesh: SplitMesh, placement: Placement | None = None) -> None:
    """Raises ValueError for a network that cannot be split over two such sides, with the reason; a
    `placement` of None is each expert once."""
    if not config.num_experts:
        raise ValueError(
            "num_experts=0 leaves the expert devices without work: decode a dense network on one "
            "mesh."
        )
    if config.delta is not None:
        raise ValueError(
            "delta is not supported: the attention devices do not store the states of Gated "
            "DeltaNet. Decode such a network on one mesh."
        )
    if config.expert_bias:
        raise ValueError(
            "expert_bias=True is not supported: the expert devices do not store biases. Decode "
            "such a network on one mesh."
        )
    if config.norm_placement != "before":
        raise ValueError(
            f"norm_placement={config.norm_placement!r} is not supported: the attention devices "
            "add expert outputs without a norm. Decode such a network on one mesh."
        )
    ep, etp = (mesh.experts.size(axes) for axes in (mesh.experts.ep, mesh.experts.etp))
    placement = placement or Placement.identity(config.num_experts, ep)
    if placement.num_experts != config.num_experts:
        raise ValueError(
            f"a placement of {placement.num_experts} experts does not fit num_experts="
            f"{config.num_experts}: place every expert."
        )
    if placement.num_devices != ep:
        raise ValueError(
            f"a placement on {placement.num_devices} devices does not fit ep={ep}: make one for "
            f"{ep} devices."
        )
    if config.d_expert % etp:
        raise ValueError(
            f"d_expert={config.d_expert} cannot be split over etp={etp} devices: choose an etp "
            "that divides it."
        )
    specs(Model(config, mesh.attention))


def side_bytes(
    config: ModelConfig, mesh: SplitMesh, placement: Placement | None = None
) -> tuple[int, int]:
    """Bytes of the weights on an attention device and on an expert device, without the placement's
    table."""
    ep, etp = (mesh.experts.size(axes) for axes in (mesh.experts.ep, mesh.experts.etp))
    placement = placement or Placement.identity(config.num_experts, ep)
    shapes = cast_shapes(config)
    weight_specs = _without_experts(specs(Model(config, mesh.attention)))
    local = local_bytes(_without_experts(shapes), weight_specs, mesh.attention)
    routed = sum(
        math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(_routed_experts(shapes))
    )
    expert_bytes = routed // config.num_experts * placement.num_slots // etp
    return sum(jax.tree.leaves(local)), expert_bytes


def attention_specs(model: Model) -> Layer[PartitionSpec]:
    """PartitionSpecs of a layer with experts on the attention side."""
    return _without_layer_axis(_without_experts(specs(model)).layers)


def first_specs(model: Model) -> Layer[PartitionSpec]:
    """PartitionSpecs of a leading dense layer."""
    first = specs(model).first_layers
    assert first is not None
    return _without_layer_axis(first)


def rest_specs(model: Model) -> Transformer[PartitionSpec]:
    """PartitionSpecs of embedding, last norm and head."""
    return without_layers(specs(model))


def expert_specs(mesh: FoldedMesh, stacked: bool = False) -> Experts[PartitionSpec]:
    """PartitionSpecs of the experts of a layer, or of stacked layers, with the layer axis first."""
    front = (None,) * stacked
    absent: Any = None
    return Experts(
        router=absent,
        gate_up=PartitionSpec(*front, mesh.ep, None, None, mesh.etp),
        down=PartitionSpec(*front, mesh.ep, mesh.etp, None),
    )


def _without_experts(weights: Transformer[Any]) -> Transformer[Any]:
    experts = weights.layers.experts
    assert experts is not None
    router_only: Any = replace(experts, gate_up=None, down=None)
    return replace(weights, layers=replace(weights.layers, experts=router_only))


def _routed_experts(weights: Transformer[Any]) -> Experts[Any]:
    experts = weights.layers.experts
    assert experts is not None
    absent: Any = None
    return replace(experts, router=absent, bias=None, router_bias=None)


def _without_layer_axis(stack: Any) -> Any:
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stack)


def _put_leaf(leaf: Any, sharding: NamedSharding) -> Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    if isinstance(leaf, np.ndarray):
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda index: leaf[index], dtype=leaf.dtype
        )
    return jax.device_put(leaf, sharding)


@cache
def _unstack_attention(model: Model) -> Callable[[Any], Any]:
    """Compiled function that unstacks the layers of the attention side, in one program, so that no
    stack outlives it."""
    dense, layers = model.config.num_dense_layers, model.config.num_expert_layers
    first = (first_specs(model),) * dense if dense else ()
    out = rest_specs(model), first, (attention_specs(model),) * layers

    def unstack(weights: Transformer[Array]) -> Any:
        unstacked = _unstack(weights.first_layers, dense), _unstack(weights.layers, layers)
        return without_layers(weights), *unstacked

    return jit_sharded(unstack, named_shardings(out, model.mesh))


@cache
def _unstack_experts(layers: int, mesh: FoldedMesh) -> Callable[[Any], Any]:
    shardings = named_shardings((expert_specs(mesh),) * layers, mesh)
    return jit_sharded(lambda stack: _unstack(stack, layers), shardings)


def _unstack(stack: Any, depth: int) -> tuple[Any, ...]:
    return tuple(jax.tree.map(lambda leaf, n=n: leaf[n], stack) for n in range(depth))
