"""Which tensors of a checkpoint each weight is made of, and how their elements are ordered.

A weight of ours is a stack over layers, and over experts, of what a checkpoint keeps as a tensor
each. Such a tensor is ``[out, in]``: the axes that the weight is summed over are its second
dimension, all others its first; one that is not summed over (a norm, a bias) has one dimension.
So names are all that differs between architectures: shapes and orders follow from the table of
weights. Gate and up, one weight of ours, are tensors of their own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from moe.config import ModelConfig
from moe.huggingface.families.family import Family
from moe.huggingface.families.tensor_names import COMMON_NAMES
from moe.weights import Weight, axis_sizes, table

STACKS = ("layer", "first_layer", "expert", "half")
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
      first: the number of the first layer of the stack.
      stack: the axes stacked over, in our order.
      dims: which of the weight's dimensions they are.
      axes: the other axes, in our order.
      out: those of a tensor's first dimension.
      inward: those of its second; empty where it has one dimension.
      sizes: of the axes.
    """

    names_of_halves: tuple[str, ...]
    first: int
    stack: tuple[str, ...]
    dims: tuple[int, ...]
    axes: tuple[str, ...]
    out: tuple[str, ...]
    inward: tuple[str, ...]
    sizes: dict[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one tensor in the checkpoint."""
        dimensions = (self.out, self.inward) if self.inward else (self.out,)
        return tuple(math.prod(self.sizes[axis] for axis in axes) for axes in dimensions)

    def names(self) -> Iterator[tuple[tuple[int, ...], str]]:
        """Each place in the stack and the name of its tensor."""
        for place in np.ndindex(*(self.sizes[axis] for axis in self.stack)):
            yield place, self.name_at(place)

    def name_at(self, place: tuple[int, ...]) -> str:
        index = dict(zip(self.stack, place, strict=True))
        layer = self.first + index.get("layer", index.get("first_layer", 0))
        name = self.names_of_halves[index.get("half", 0)]
        return name.format(layer=layer, expert=index.get("expert", 0))

    def at(self, place: tuple[int, ...]) -> tuple[int | slice, ...]:
        """What picks the tensor of a place out of the weight, along all our axes."""
        picked: list[int | slice] = [slice(None)] * (len(self.stack) + len(self.axes))
        for dim, index in zip(self.dims, place, strict=True):
            picked[dim] = index
        return tuple(picked)

    def part(self, own: Slices) -> Slices:
        """Where in a tensor the elements are that `own` selects along our axes, and as few others
        as a slice allows: of a dimension made of several axes it cuts the first."""
        wanted = dict(zip(self.axes, own, strict=True))
        dimensions = (self.out, self.inward) if self.inward else (self.out,)
        return tuple(self._range(axes, wanted) for axes in dimensions)

    def _range(self, axes: tuple[str, ...], wanted: dict[str, slice]) -> slice:
        if not axes:
            return slice(0, 1)
        inner = math.prod(self.sizes[axis] for axis in axes[1:])
        start, stop, _ = wanted[axes[0]].indices(self.sizes[axes[0]])
        return slice(start * inner, stop * inner)

    def to_ours(self, part: np.ndarray, own: Slices) -> np.ndarray:
        """What `own` selects along our axes, from the `part` of a tensor that holds it."""
        wanted, theirs = dict(zip(self.axes, own, strict=True)), (*self.out, *self.inward)
        cut = {axes[0] for axes in (self.out, self.inward) if axes}
        # Of the axes that a dimension is made of, the first is cut already.
        sizes = [
            len(range(*wanted[axis].indices(self.sizes[axis]))) if axis in cut else self.sizes[axis]
            for axis in theirs
        ]
        split = part.reshape(sizes)
        split = split[tuple(slice(None) if a in cut else wanted[a] for a in theirs)]
        return split.transpose([theirs.index(axis) for axis in self.axes])

    def to_theirs(self, own: np.ndarray) -> np.ndarray:
        """A whole tensor of ours as the checkpoint orders it."""
        order = [self.axes.index(axis) for axis in (*self.out, *self.inward)]
        return own.transpose(order).reshape(self.shape)


def tensors_of(config: ModelConfig, family: Family) -> list[Tensors]:
    """The tensors of every weight, in the order of `jax.tree.leaves` of the table."""
    sizes = axis_sizes(config)
    listed = jax.tree_util.tree_leaves_with_path(table(config))
    return [_tensors(_dotted(path), weight, config, family, sizes) for path, weight in listed]


def _tensors(
    path: str, weight: Weight, config: ModelConfig, family: Family, sizes: dict[str, int]
) -> Tensors:
    axes = weight.axes.split()
    stack = tuple(axis for axis in axes if axis in STACKS)
    paths = [path.replace("gate_up", half) for half in HALVES] if "half" in stack else [path]
    rest = tuple(axis for axis in axes if axis not in STACKS)
    inward = tuple(weight.fan_in.split())
    return Tensors(
        names_of_halves=tuple(_name(one, config, family) for one in paths),
        first=config.num_dense_layers if path.startswith("layers.") else 0,
        stack=stack,
        dims=tuple(axes.index(axis) for axis in stack),
        axes=rest,
        out=tuple(axis for axis in rest if axis not in inward),
        inward=inward,
        sizes=sizes,
    )


def _name(path: str, config: ModelConfig, family: Family) -> str:
    ends = {
        "embedding": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
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
    return "model.layers.{layer}." + names[own]


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(entry.name for entry in path)
