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

from moe.config import ModelConfig
from moe.disaggregated.placement import Copies, Placement, of_layers
from moe.disaggregated.split import SplitMesh, is_here
from moe.placement import specs
from moe.weights import Experts, Layer, Transformer, cast_shapes
from sharding.folding import FoldedMesh

Leaf = TypeVar("Leaf")


@struct.dataclass
class SplitWeights(Generic[Leaf]):
    """Unstacked weights of both sides: a record for each layer, so that one compiled program runs
    all layers and copies none out of a stack.

    Attributes:
      rest: embedding, last norm and head, without layers; None in a process without attention
        devices, where `first`, `attention` and `copies` are empty.
      first: the leading dense layers.
      attention: the other layers; their experts are a router and a selection bias only.
      experts: the routed experts of each of those, by the slots of a `Placement`; no router. Empty
        in a process without expert devices.
      copies: for each of those, the table of slots of each expert, replicated over the attention
        devices; empty in a process without them.
    """

    rest: Transformer[Leaf] | None
    first: tuple[Layer[Leaf], ...]
    attention: tuple[Layer[Leaf], ...]
    experts: tuple[Experts[Leaf], ...]
    copies: tuple[Copies, ...]


def to_sides(
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
    placed_in = of_layers(placement, config.num_expert_layers)
    for one in placed_in:
        check_splits(config, mesh, one)
    rest, first, attention, copies = None, (), (), ()
    # Both sides in all processes: each has a part of what is read.
    one_side = _without_experts(weights)
    places = _without_experts(specs(config, mesh.attention))
    placed = _put(one_side, places, mesh.attention)
    if is_here(mesh.attention):
        rest, first, attention = _attention_apart(config, mesh.attention)(placed)
        whole = NamedSharding(mesh.attention.mesh, PartitionSpec())
        tables = tuple(one.table() for one in placed_in)
        copies = jax.tree.map(lambda x: _put_leaf(x, whole), tables)
    experts, routed = (), _routed(weights)
    if not all(one.is_identity for one in placed_in):
        held = np.stack([one.experts for one in placed_in])
        layers = np.arange(len(held))[:, None]
        routed = jax.tree.map(lambda x: x[layers, held], routed)
    placed = _put(routed, expert_specs(mesh.experts, stacked=True), mesh.experts)
    if is_here(mesh.experts):
        experts = _experts_apart(config.num_expert_layers, mesh.experts)(placed)
    return SplitWeights(rest, first, attention, experts, copies)


def moved(
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
    experts, copies = list(weights.experts), list(weights.copies)
    on_all = (NamedSharding(side.mesh, PartitionSpec()) for side in (mesh.attention, mesh.experts))
    on_attention, on_experts = on_all
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        if experts:
            held = old.experts.tolist()
            sources = np.array([held.index(expert) for expert in new.experts], np.int32)
            experts[layer] = _taking(mesh.experts)(experts[layer], _put_leaf(sources, on_experts))
        if copies:
            copies[layer] = jax.tree.map(lambda x: _put_leaf(x, on_attention), new.table())
    return replace(weights, experts=tuple(experts), copies=tuple(copies))


@cache
def _taking(mesh: FoldedMesh) -> Callable[[Experts[Array], Array], Experts[Array]]:
    """Compiled gather of the experts of a layer by slot index; the old ones are donated."""
    places = jax.tree.map(lambda spec: NamedSharding(mesh.mesh, spec), expert_specs(mesh))

    def take(experts: Experts[Array], slots: Array) -> Experts[Array]:
        return jax.tree.map(lambda x: x[slots], experts)

    return jax.jit(take, out_shardings=places, donate_argnums=0)


def check_splits(config: ModelConfig, mesh: SplitMesh, placement: Placement | None = None) -> None:
    """Checks that a network can be split over two such sides.

    Args:
      placement: None is each expert once.

    Raises:
      ValueError: if it cannot, with the reason.
    """
    if not config.num_experts:
        raise ValueError(
            "num_experts=0 leaves the devices of the experts without work: decode a dense network "
            "on one mesh."
        )
    if config.delta is not None:
        raise ValueError(
            "delta puts Gated DeltaNet in some layers, whose states the side of attention does not "
            "keep: decode such a network on one mesh."
        )
    if config.expert_bias:
        raise ValueError(
            "expert_bias=True is of experts whose biases the side of experts does not hold: decode "
            "such a network on one mesh."
        )
    if config.norm_placement != "before":
        raise ValueError(
            f"norm_placement={config.norm_placement!r} normalises what experts give, and the side "
            "of attention adds it up as it comes: decode such a network on one mesh."
        )
    ep, etp = (mesh.experts.size(axes) for axes in (mesh.experts.ep, mesh.experts.etp))
    placement = placement or Placement.identity(config.num_experts, ep)
    if len(placement.copies) != config.num_experts:
        raise ValueError(
            f"a placement of {len(placement.copies)} experts is none of num_experts="
            f"{config.num_experts}: place each of them."
        )
    if placement.num_devices != ep:
        raise ValueError(
            f"a placement on {placement.num_devices} devices does not fit ep={ep}: plan for {ep}."
        )
    if config.d_expert % etp:
        raise ValueError(
            f"d_expert={config.d_expert} cannot be split over etp={etp} devices: choose an etp "
            "that divides it."
        )
    specs(config, mesh.attention)


def side_bytes(
    config: ModelConfig, mesh: SplitMesh, placement: Placement | None = None
) -> tuple[int, int]:
    """Bytes of the weights on an attention device and on an expert device, without the placement's
    table."""
    ep, etp = (mesh.experts.size(axes) for axes in (mesh.experts.ep, mesh.experts.etp))
    placement = placement or Placement.identity(config.num_experts, ep)
    like = cast_shapes(config)

    def on_one(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        place = NamedSharding(mesh.attention.mesh, spec)
        return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    places = _without_experts(specs(config, mesh.attention))
    attention = sum(jax.tree.leaves(jax.tree.map(on_one, _without_experts(like), places)))
    routed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(_routed(like)))
    return attention, routed // config.num_experts * placement.num_slots // etp


def attention_specs(config: ModelConfig, mesh: FoldedMesh) -> Layer[PartitionSpec]:
    """PartitionSpecs of a layer with experts on the attention side."""
    return _of_layer(_without_experts(specs(config, mesh)).layers)


def first_specs(config: ModelConfig, mesh: FoldedMesh) -> Layer[PartitionSpec]:
    """PartitionSpecs of a leading dense layer."""
    first = specs(config, mesh).first_layers
    assert first is not None
    return _of_layer(first)


def rest_specs(config: ModelConfig, mesh: FoldedMesh) -> Transformer[PartitionSpec]:
    """PartitionSpecs of embedding, last norm and head."""
    return _without_layers(specs(config, mesh))


def expert_specs(mesh: FoldedMesh, stacked: bool = False) -> Experts[PartitionSpec]:
    """PartitionSpecs of the experts of a layer, or of stacked layers, with the layer axis first."""
    front = (None,) * stacked
    nothing: Any = None
    return Experts(
        router=nothing,
        gate_up=PartitionSpec(*front, mesh.ep, None, None, mesh.etp),
        down=PartitionSpec(*front, mesh.ep, mesh.etp, None),
    )


def _without_experts(weights: Transformer[Any]) -> Transformer[Any]:
    experts = weights.layers.experts
    assert experts is not None
    kept: Any = replace(experts, gate_up=None, down=None)
    return replace(weights, layers=replace(weights.layers, experts=kept))


def _without_layers(weights: Transformer[Any]) -> Transformer[Any]:
    nothing: Any = jax.tree.map(lambda _: None, weights.layers)
    return replace(weights, layers=nothing, first_layers=None)


def _routed(weights: Transformer[Any]) -> Experts[Any]:
    experts = weights.layers.experts
    assert experts is not None
    nothing: Any = None
    return replace(experts, router=nothing, bias=None, router_bias=None)


def _of_layer(stack: Any) -> Any:
    return jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stack)


def _put(tree: Any, places: Any, mesh: FoldedMesh) -> Any:
    def one(leaf: Any, spec: PartitionSpec) -> Array:
        return _put_leaf(leaf, NamedSharding(mesh.mesh, spec))

    return jax.tree.map(one, tree, places)


def _put_leaf(leaf: Any, place: NamedSharding) -> Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    if isinstance(leaf, np.ndarray):
        return jax.make_array_from_callback(
            leaf.shape, place, lambda index: leaf[index], dtype=leaf.dtype
        )
    return jax.device_put(leaf, place)


@cache
def _attention_apart(config: ModelConfig, mesh: FoldedMesh) -> Callable[[Any], Any]:
    """Compiled function that unstacks the layers of the attention side, in one program, so that no
    stack outlives it."""
    places = specs(config, mesh)
    layers = config.num_expert_layers
    first = () if places.first_layers is None else (first_specs(config, mesh),)
    out = (
        rest_specs(config, mesh),
        first * config.num_dense_layers,
        (attention_specs(config, mesh),) * layers,
    )

    def apart(weights: Transformer[Array]) -> Any:
        return (
            _without_layers(weights),
            _cut(weights.first_layers, config.num_dense_layers),
            _cut(weights.layers, layers),
        )

    return _taking_apart(apart, out, mesh)


@cache
def _experts_apart(layers: int, mesh: FoldedMesh) -> Callable[[Any], Any]:
    return _taking_apart(lambda stack: _cut(stack, layers), (expert_specs(mesh),) * layers, mesh)


def _cut(stack: Any, depth: int) -> tuple[Any, ...]:
    return tuple(jax.tree.map(lambda leaf, n=n: leaf[n], stack) for n in range(depth))


def _taking_apart(apart: Callable[[Any], Any], out: Any, mesh: FoldedMesh) -> Callable[[Any], Any]:
    leaves, structure = jax.tree.flatten(out)
    placed = [NamedSharding(mesh.mesh, spec) for spec in leaves]
    program = jax.jit(lambda weights: jax.tree.leaves(apart(weights)), out_shardings=placed)
    return lambda weights: structure.unflatten(program(weights))
