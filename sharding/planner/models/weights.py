"""Weights of one device, by replica group.

These are the groups over which gradients are summed and optimizer states are sharded.
"""

import functools
from dataclasses import dataclass, replace

from sharding.folding import Layout
from sharding.planner.method import Method, Storage
from sharding.planner.models.sizes import ModelSizes


@dataclass(frozen=True)
class Held:
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
        size = 1
        for axis in self.replicas:
            size *= getattr(layout, axis)
        return size

    def part(self, layout: Layout) -> int:
        """Parameters of one shard, where they are sharded over the group (ZeRO)."""
        return -(-self.parameters // self.group(layout))


@functools.lru_cache(maxsize=1024)
def one_chunk(layout: Layout) -> Layout:
    """The layout with one chunk of layers on each stage."""
    return layout if layout.vpp == 1 else replace(layout, vpp=1)


def as_held(model: ModelSizes, layout: Layout) -> Layout:
    """The layout with one chunk on each stage if a device then has the same weights.

    It is a cache key: results are shared by all numbers of chunks.
    """
    alone = one_chunk(layout)
    same = layers_on_device(model, alone) == layers_on_device(model, layout)
    return alone if same else layout


@functools.lru_cache(maxsize=1024)
def held(model: ModelSizes, layout: Layout) -> tuple[Held, ...]:
    """All weights of one device.

    Attention and dense layers are sharded over ``tp``, experts over ``ep`` and ``etp``, layers over
    ``pp``, and rows of the embedding and columns of the head over ``tp`` where it divides them;
    norms and routers are replicated. Every stage has embedding, head and the first dense layers,
    and chunks that are all as deep as the deepest.
    """
    h, tp = model.d_model, layout.tp
    layers = layers_on_device(model, layout)
    routed = layers if model.num_experts else 0
    same, whole = ("dp", "cp"), ("dp", "cp", "tp")
    first, ends, spread = model.num_dense_layers, ("pp", *whole), ("pp", *same)
    is_spread = spreads_vocabulary(model, layout)
    tables = (1 if model.tied else 2) * model.vocab_size * h // (tp if is_spread else 1)
    found = [
        Held("attention", layers * model.attention_parameters // tp, same, depth=layers),
        Held("dense layers", layers * 3 * h * model.d_ff // tp, same, depth=layers),
        Held(
            "norms and routers",
            layers * 2 * h + routed * h * model.num_experts,
            whole,
            depth=layers,
            is_precise=True,
        ),
        Held(
            "experts",
            routed * model.expert_parameters // (layout.ep * layout.etp),
            ("edp",),
            depth=layers,
        ),
        Held(
            "first dense layers",
            first * (model.attention_parameters + 3 * h * model.dense_d_ff) // tp,
            spread,
            in_layers=False,
            depth=first,
        ),
        Held(
            "norms of first layers",
            first * 2 * h,
            ends,
            in_layers=False,
            depth=first,
            is_precise=True,
        ),
        Held("embedding and head", tables, spread if is_spread else ends, in_layers=False),
        Held("last norm", h, ends, in_layers=False, is_precise=True),
    ]
    return tuple(one for one in found if one.parameters)


def layers_on_device(model: ModelSizes, layout: Layout) -> int:
    """Layers of a pipeline stage, after the dense first ones; of the deepest if stages differ."""
    like, chunks = model.num_layers - model.num_dense_layers, layout.pp * layout.vpp
    return layout.vpp * -(-like // chunks)


def spreads_vocabulary(model: ModelSizes, layout: Layout) -> bool:
    """True if ``tp`` divides the vocabulary: else each of its ranks has all rows and columns."""
    return model.vocab_size % layout.tp == 0


def parameters_on_device(model: ModelSizes, layout: Layout) -> int:
    """Number of parameters on a device, as they are used."""
    return sum(one.parameters for one in held(model, layout))


@functools.lru_cache(maxsize=1024)
def parameters_in_parts(model: ModelSizes, layout: Layout) -> int:
    """Number of parameters whose optimizer state a device keeps (ZeRO)."""
    return sum(one.part(layout) for one in held(model, layout))
