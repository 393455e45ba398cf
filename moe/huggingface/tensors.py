"""Mapping of weights to checkpoint tensors: their names, shapes and element order.

A weight of ours is a stack over layers, and over experts, of single tensors of a checkpoint. Such a
tensor is ``[out, in]``: the axes that the weight is summed over are its second dimension, all
others its first; one that is not summed over (a norm, a bias) has one dimension. So most
architectures differ in names alone: shapes and orders follow from the table of weights. Gate and
up, one weight of ours, are separate tensors. Where an architecture stores a weight in another way,
`moe.huggingface.families.family.Stored` describes it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from moe.architecture.delta import delta_layers
from moe.config import ModelConfig
from moe.huggingface.families.family import Family, Stored
from moe.huggingface.families.tensor_names import COMMON_NAMES
from moe.weights import Weight, axis_sizes, table

STACKS = ("layer", "first_layer", "attention_layer", "delta_layer", "expert", "half")
"""Axes of a weight along which a checkpoint has a tensor for each index."""
HALVES = ("gate", "up")
"""What the entries of the axis ``half`` are called."""

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Tensors:
    """The tensors of one weight.

    Args:
      names_of_halves: of a tensor, with ``{layer}`` and ``{expert}``; one for each of `HALVES`, or
        one alone.
      layers: the number of each layer of the stack.
      stack: the axes stacked over, in our order.
      dims: which of the weight's dimensions they are.
      axes: the other axes, in our order.
      dimensions: the axes that each of a tensor's dimensions is made of.
      sizes: of the axes.
      offset: added to a tensor's numbers to make ours.
    """

    names_of_halves: tuple[str, ...]
    layers: tuple[int, ...]
    stack: tuple[str, ...]
    dims: tuple[int, ...]
    axes: tuple[str, ...]
    dimensions: tuple[tuple[str, ...], ...]
    sizes: dict[str, int]
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one tensor in the checkpoint."""
        return tuple(math.prod(self.sizes[axis] for axis in axes) for axes in self.dimensions)

    def names(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Each place in the stack and the name of its tensor."""
        for place in np.ndindex(*(self.sizes[axis] for axis in self.stack)):
            yield place, self.name_at(place)

    def name_at(self, place: tuple[int, ...]) -> str:
        index = dict(zip(self.stack, place, strict=True))
        of_stack = (index[axis] for axis in self.stack if axis.endswith("layer"))
        layer = self.layers[next(of_stack, 0)]
        name = self.names_of_halves[index.get("half", 0)]
        return name.format(layer=layer, expert=index.get("expert", 0))

    def at(self, place: tuple[int, ...]) -> tuple[int | slice, ...]:
        """Index of one tensor in the weight, along all our axes."""
        picked: list[int | slice] = [slice(None)] * (len(self.stack) + len(self.axes))
        for dim, index in zip(self.dims, place, strict=True):
            picked[dim] = index
        return tuple(picked)

    def part(self, own: Slices) -> Slices:
        """Slices of a tensor with the elements that `own` selects along our axes, and as few others
        as slices allow: a dimension made of multiple axes is sliced along the first."""
        wanted = dict(zip(self.axes, own, strict=True))
        return tuple(self._range(axes, wanted) for axes in self.dimensions)

    def _range(self, axes: tuple[str, ...], wanted: dict[str, slice]) -> slice:
        if not axes:
            return slice(0, 1)
        inner = math.prod(self.sizes[axis] for axis in axes[1:])
        start, stop, _ = wanted[axes[0]].indices(self.sizes[axes[0]])
        return slice(start * inner, stop * inner)

    def to_ours(self, part: np.ndarray, own: Slices) -> np.ndarray:
        """Elements that `own` selects along our axes, from the `part` of a tensor that contains
        them."""
        wanted, theirs = dict(zip(self.axes, own, strict=True)), self._theirs
        cut = {axes[0] for axes in self.dimensions if axes}
        # Of the axes that a dimension is made of, the first is cut already.
        sizes = [
            len(range(*wanted[axis].indices(self.sizes[axis]))) if axis in cut else self.sizes[axis]
            for axis in theirs
        ]
        split = part.reshape(sizes)
        split = split[tuple(slice(None) if a in cut else wanted[a] for a in theirs)]
        ours = split.transpose([theirs.index(axis) for axis in self.axes]).astype(np.float32)
        return ours + np.float32(self.offset) if self.offset else ours

    def to_theirs(self, own: np.ndarray) -> np.ndarray:
        """A whole tensor of ours as the checkpoint orders it."""
        order = [self.axes.index(axis) for axis in self._theirs]
        own = own.transpose(order).reshape(self.shape)
        return own - np.float32(self.offset) if self.offset else own

    @property
    def _theirs(self) -> tuple[str, ...]:
        """The axes in a tensor's order."""
        return tuple(axis for axes in self.dimensions for axis in axes)


def tensors_of(config: ModelConfig, family: Family) -> list[Tensors]:
    """The tensors of every weight, in the order of `jax.tree.leaves` of the table."""
    sizes = axis_sizes(config)
    listed = jax.tree_util.tree_leaves_with_path(table(config))
    return [_tensors(_dotted(path), weight, config, family, sizes) for path, weight in listed]


def _tensors(
    path: str, weight: Weight, config: ModelConfig, family: Family, sizes: dict[str, int]
) -> Tensors:
    axes = weight.axes.split()
    whole = _stored(path, config, family)
    if whole is None:
        stored = [_stored(path.replace("gate_up", half), config, family) for half in HALVES]
    else:
        stored = [whole]
    tensors = [tensor for tensor in stored if tensor is not None]
    inward = tuple(weight.fan_in.split())
    if tensors[0].dimensions is None:
        stack = tuple(axis for axis in axes if axis in STACKS)
        out = tuple(axis for axis in axes if axis not in (*stack, *inward))
        dimensions = (out, inward) if inward else (out,)
    else:
        dimensions = tuple(tuple(part.split()) for part in tensors[0].dimensions.split(","))
        stack = tuple(axis for axis in axes if not any(axis in part for part in dimensions))
    return Tensors(
        names_of_halves=tuple(tensor.name for tensor in tensors),
        layers=_layers(axes[0], config),
        stack=stack,
        dims=tuple(axes.index(axis) for axis in stack),
        axes=tuple(axis for axis in axes if axis not in stack),
        dimensions=dimensions,
        sizes=sizes,
        offset=tensors[0].offset,
    )


def _layers(axis: str, config: ModelConfig) -> tuple[int, ...]:
    """The numbers of the layers that a weight is stacked over."""
    dense, of_delta = config.num_dense_layers, delta_layers(config)
    every = range(dense, config.num_layers)
    stacks = {
        "first_layer": range(dense),
        "layer": every,
        "attention_layer": [layer for layer in every if layer not in of_delta],
        "delta_layer": of_delta,
    }
    return tuple(stacks.get(axis, (0,)))


def _stored(path: str, config: ModelConfig, family: Family) -> Stored | None:
    """The tensor of a weight; None where its halves have one each."""
    ends = {
        "embedding": Stored("model.embed_tokens.weight"),
        "norm": family.last_norm,
        "head": Stored("lm_head.weight"),
    }
    if path in ends:
        return ends[path]
    stack, _, own = path.partition(".")
    names = {**COMMON_NAMES, **family.names}
    plain = own.startswith("dense.") and (stack == "first_layers" or not config.num_experts)
    without_latent = own == "attention.query" and (
        config.mla is None or config.mla.q_lora_rank is None
    )
    if plain or without_latent:
        names = COMMON_NAMES
    if own.endswith(".gate_up") and own not in names:
        return None
    named = names[own]
    named = Stored(named) if isinstance(named, str) else named
    return replace(named, name="model.layers.{layer}." + named.name)


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(entry.name for entry in path)
