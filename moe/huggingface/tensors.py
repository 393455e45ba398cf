"""Mapping of weights to checkpoint tensors: their names, shapes and element order.

A weight of ours is a stack over layers, and over experts, of single tensors of a checkpoint. Such a
tensor is ``[out, in]``: the axes that the weight is summed over are its second dimension, all
others its first; one that is not summed over (a norm, a bias) has one dimension. So most
architectures differ in names alone: shapes and orders follow from the table of weights. Gate and
up, one weight of ours, are separate tensors. If an architecture stores a weight in another way,
`moe.huggingface.family.Stored` describes it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from moe.architecture.attention import delta_layers
from moe.config import ModelConfig
from moe.huggingface.family import COMMON_NAMES, Family, Stored
from moe.huggingface.quantised import Slices
from moe.weights import Weight, axis_sizes, table

STACKS = ("layer", "first_layer", "attention_layer", "delta_layer", "expert", "half")
"""Axes of a weight along which a checkpoint has a tensor for each index."""
GATE_AND_UP = ("gate", "up")
"""What the entries of the axis ``half`` are called."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of one weight.

    Args:
      name_templates: names of a tensor with ``{layer}`` and ``{expert}``; one for each of
        `GATE_AND_UP`, or a single one.
      layers: the number of each layer of the stack.
      stack: the axes stacked over, in our order.
      dims: which of the weight's dimensions they are.
      axes: the other axes, in our order.
      dimensions: the axes that each of a tensor's dimensions is made of.
      sizes: sizes of the axes.
      offset: added to a tensor's numbers to make ours.
    """

    name_templates: tuple[str, ...]
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
        """Each index in the stack and the name of its tensor."""
        for index in np.ndindex(*(self.sizes[axis] for axis in self.stack)):
            yield index, self.name_at(index)

    def name_at(self, index: tuple[int, ...]) -> str:
        by_axis = dict(zip(self.stack, index, strict=True))
        of_stack = (by_axis[axis] for axis in self.stack if axis.endswith("layer"))
        layer = self.layers[next(of_stack, 0)]
        name = self.name_templates[by_axis.get("half", 0)]
        return name.format(layer=layer, expert=by_axis.get("expert", 0))

    def index_in_weight(self, index: tuple[int, ...]) -> tuple[int | slice, ...]:
        """Index of one tensor in the weight, along all our axes."""
        selection: list[int | slice] = [slice(None)] * (len(self.stack) + len(self.axes))
        for dim, position in zip(self.dims, index, strict=True):
            selection[dim] = position
        return tuple(selection)

    def slices_in_tensor(self, selection: Slices) -> Slices:
        """Slices of a tensor with the elements that `selection` selects along our axes, and as few
        others as slices allow: a dimension made of multiple axes is sliced along the first."""
        by_axis = dict(zip(self.axes, selection, strict=True))
        return tuple(self._range(axes, by_axis) for axes in self.dimensions)

    def _range(self, axes: tuple[str, ...], by_axis: dict[str, slice]) -> slice:
        if not axes:
            return slice(0, 1)
        inner = math.prod(self.sizes[axis] for axis in axes[1:])
        start, stop, _ = by_axis[axes[0]].indices(self.sizes[axes[0]])
        return slice(start * inner, stop * inner)

    def to_ours(self, elements: np.ndarray, selection: Slices) -> np.ndarray:
        """Elements that `selection` selects along our axes, from elements of a tensor that contain
        them, in float32; a view of those if possible."""
        by_axis, theirs = dict(zip(self.axes, selection, strict=True)), self._theirs
        cut = {axes[0] for axes in self.dimensions if axes}
        # Of the axes that a dimension is made of, the first is cut already.
        sizes = [
            len(range(*by_axis[axis].indices(self.sizes[axis])))
            if axis in cut
            else self.sizes[axis]
            for axis in theirs
        ]
        split = elements.reshape(sizes)
        split = split[tuple(slice(None) if a in cut else by_axis[a] for a in theirs)]
        ours = split.transpose([theirs.index(axis) for axis in self.axes])
        ours = ours.astype(np.float32, copy=False)
        return ours + np.float32(self.offset) if self.offset else ours

    def to_theirs(self, weight: np.ndarray) -> np.ndarray:
        """A whole tensor of ours as the checkpoint orders it."""
        order = [self.axes.index(axis) for axis in self._theirs]
        weight = weight.transpose(order).reshape(self.shape)
        return weight - np.float32(self.offset) if self.offset else weight

    @property
    def _theirs(self) -> tuple[str, ...]:
        """The axes in a tensor's order."""
        return tuple(axis for axes in self.dimensions for axis in axes)


def tensors_of(config: ModelConfig, family: Family) -> list[Tensors]:
    """The tensors of every weight, in the order of `jax.tree.leaves` of the table."""
    sizes = axis_sizes(config)
    listed = jax.tree_util.tree_leaves_with_path(table(config))
    return [_tensors(_dotted_path(path), weight, config, family, sizes) for path, weight in listed]


def _tensors(
    path: str, weight: Weight, config: ModelConfig, family: Family, sizes: dict[str, int]
) -> Tensors:
    axes = weight.axes.split()
    stored, in_axes = _stored_tensors(path, config, family), tuple(weight.fan_in.split())
    if stored[0].dimensions is None:
        stack = tuple(axis for axis in axes if axis in STACKS)
        out_axes = tuple(axis for axis in axes if axis not in (*stack, *in_axes))
        dimensions = (out_axes, in_axes) if in_axes else (out_axes,)
    else:
        dimensions = tuple(tuple(named.split()) for named in stored[0].dimensions.split(","))
        stack = tuple(axis for axis in axes if not any(axis in named for named in dimensions))
    return Tensors(
        name_templates=tuple(tensor.name for tensor in stored),
        layers=_layers(axes[0], config),
        stack=stack,
        dims=tuple(axes.index(axis) for axis in stack),
        axes=tuple(axis for axis in axes if axis not in stack),
        dimensions=dimensions,
        sizes=sizes,
        offset=stored[0].offset,
    )


def _layers(axis: str, config: ModelConfig) -> tuple[int, ...]:
    """The numbers of the layers that a weight is stacked over."""
    dense, with_delta = config.num_dense_layers, delta_layers(config)
    all_layers = range(dense, config.num_layers)
    stacks = {
        "first_layer": range(dense),
        "layer": all_layers,
        "attention_layer": [layer for layer in all_layers if layer not in with_delta],
        "delta_layer": with_delta,
    }
    return tuple(stacks.get(axis, (0,)))


def _stored_tensors(path: str, config: ModelConfig, family: Family) -> list[Stored]:
    """The tensor of a weight, or the tensors of its halves."""
    ends = {
        "embedding": Stored("model.embed_tokens.weight"),
        "norm": family.last_norm,
        "head": Stored("lm_head.weight"),
    }
    if path in ends:
        return [ends[path]]
    stack, _, path_in_layer = path.partition(".")
    names = {**COMMON_NAMES, **family.names}
    is_plain_dense = path_in_layer.startswith("dense.") and (
        stack == "first_layers" or not config.num_experts
    )
    without_latent = path_in_layer == "attention.query" and (
        config.mla is None or config.mla.q_lora_rank is None
    )
    if is_plain_dense or without_latent:
        names = COMMON_NAMES
    if path_in_layer.endswith(".gate_up") and path_in_layer not in names:
        half_paths = (path.replace("gate_up", name) for name in GATE_AND_UP)
        return [tensor for half in half_paths for tensor in _stored_tensors(half, config, family)]
    tensor = names[path_in_layer]
    tensor = Stored(tensor) if isinstance(tensor, str) else tensor
    return [replace(tensor, name="model.layers.{layer}." + tensor.name)]


def _dotted_path(path: tuple[Any, ...]) -> str:
    return ".".join(entry.name for entry in path)
