"""Weights of one device, by the devices that share their gradients and optimizer states."""

import functools
import math
from dataclasses import dataclass, replace

from moe.planner.method import Method, Storage
from moe.planner.models import ModelSizes
from sharding.folding import Layout


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one device that share a replica group.

    Attributes:
      what: in words.
      parameters: on the device, of all its layers.
      replicas: logical axes over which they are replicated.
      in_layers: they belong to the equal layers, which full sharding gathers one by one.
      depth: number of layers they belong to; 0 for those of no layer.
      is_precise: they are norms or routers, which may stay float32 (`Method.stored_precise`).
    """

    what: str
    parameters: int
    replicas: tuple[str, ...]
    in_layers: bool = True
    depth: int = 0
    is_precise: bool = False

    def stored(self, method: Method) -> Storage:
        """Bytes of each of them."""
        return method.stored_precise if self.is_precise else method.stored

    def group(self, layout: Layout) -> int:
        """Size of the replica group."""
        return math.prod(getattr(layout, axis) for axis in self.replicas)

    def shard_size(self, layout: Layout) -> int:
        """Parameters of one shard, where they are sharded over the group (ZeRO)."""
        return -(-self.parameters // self.group(layout))


@functools.lru_cache(maxsize=1024)
def single_chunk(layout: Layout) -> Layout:
    """The layout with one chunk of layers on each stage."""
    return layout if layout.vpp == 1 else replace(layout, vpp=1)


def weight_layout(model: ModelSizes, layout: Layout) -> Layout:
    """The layout with one chunk a stage if a device then has the same weights: a cache key."""
    reduced = single_chunk(layout)
    is_same = layers_on_device(model, reduced) == layers_on_device(model, layout)
    return reduced if is_same else layout


@functools.lru_cache(maxsize=1024)
def weight_groups(model: ModelSizes, layout: Layout) -> tuple[WeightGroup, ...]:
    """All weights of one device.

    Attention and dense layers are sharded over ``tp``, experts over ``ep`` and ``etp``, layers over
    ``pp``, and rows of the embedding and columns of the head over ``tp`` where it divides them;
    norms and routers are replicated. Every stage has embedding, head and the first dense layers,
    and chunks that are all as deep as the deepest.
    """
    h, tp = model.d_model, layout.tp
    layers = layers_on_device(model, layout)
    routed = layers if model.num_experts else 0
    tp_sharded, tp_replicated = ("dp", "cp"), ("dp", "cp", "tp")
    num_first = model.num_dense_layers
    all_stages_replicated = ("pp", *tp_replicated)
    all_stages_sharded = ("pp", *tp_sharded)
    shards_tables = shards_vocabulary(model, layout)
    tables = (1 if model.tied else 2) * model.vocab_size * h // (tp if shards_tables else 1)
    in_layer = functools.partial(WeightGroup, depth=layers)
    in_first = functools.partial(WeightGroup, in_layers=False, depth=num_first)
    outside = functools.partial(WeightGroup, in_layers=False)
    norms = layers * 2 * h + routed * h * model.num_experts
    experts = routed * model.expert_parameters // (layout.ep * layout.etp)
    first = num_first * (model.attention_parameters + 3 * h * model.dense_d_ff) // tp
    table_replicas = all_stages_sharded if shards_tables else all_stages_replicated
    groups = [
        in_layer("attention", layers * model.attention_parameters // tp, tp_sharded),
        in_layer("dense layers", layers * 3 * h * model.d_ff // tp, tp_sharded),
        in_layer("norms and routers", norms, tp_replicated, is_precise=True),
        in_layer("experts", experts, ("edp",)),
        in_first("first dense layers", first, all_stages_sharded),
        in_first(
            "norms of first layers", num_first * 2 * h, all_stages_replicated, is_precise=True
        ),
        outside("embedding and head", tables, table_replicas),
        outside("last norm", h, all_stages_replicated, is_precise=True),
    ]
    return tuple(group for group in groups if group.parameters)


def layers_on_device(model: ModelSizes, layout: Layout) -> int:
    """Layers of a pipeline stage, after the dense first ones; of the deepest if stages differ."""
    return layout.vpp * -(-model.num_main_layers // (layout.pp * layout.vpp))


def layers_on_deepest_stage(model: ModelSizes, layout: Layout) -> float:
    """`layers_on_device` with their share of the dense first layers."""
    return model.num_layers * layers_on_device(model, layout) / model.num_main_layers


def shards_vocabulary(model: ModelSizes, layout: Layout) -> bool:
    """True if ``tp`` divides the vocabulary: else each of its ranks has all rows and columns."""
    return model.vocab_size % layout.tp == 0


def parameters_on_device(model: ModelSizes, layout: Layout) -> int:
    """Number of parameters on a device, as they are used."""
    return sum(group.parameters for group in weight_groups(model, layout))


@functools.lru_cache(maxsize=1024)
def sharded_parameters(model: ModelSizes, layout: Layout) -> int:
    """Number of parameters whose optimizer state a device keeps (ZeRO)."""
    return sum(group.shard_size(layout) for group in weight_groups(model, layout))
