"""LoRA: weights with adapters, matrix products with them, trees of such weights: their table, and
the splits and merges of them.

`statement` is the table of the network (`moe.weights.table`), which says which weights are frozen
and which have adapters.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from moe.architecture.lora import MATRICES
from moe.config import ModelConfig

Leaf = TypeVar("Leaf")
Product = Callable[[Array, Any], Array]
"""(x, matrix) -> ``x matrix``, of whatever axes."""

Tree = TypeVar("Tree")

STACKS = ("layer", "first_layer", "attention_layer", "expert")
"""Axes along which each entry has an adapter of its own."""


@struct.dataclass
class Adapted(Generic[Leaf]):
    """The weight ``W + s A B``, which is never materialised in training.

    Attributes:
      base: ``W``, frozen.
      a: the axes that `base` is summed over, and the rank.
      b: the rank, and the other axes of `base`. (The names are PEFT's ``lora_A``, ``lora_B``.)
      scale: ``s``.
    """

    base: Leaf
    a: Leaf
    b: Leaf
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        base: Any = self.base
        return base.shape


Matrix = Array | Adapted[Array]


def matmul(x: Array, matrix: Array) -> Array:
    """``x matrix``, the matrix cast to the dtype of `x`."""
    return x @ matrix.astype(x.dtype)


def product(
    dot: Product,
    x: Array,
    weight: Matrix,
    dot_a: Product = jnp.matmul,
    dot_b: Product = jnp.matmul,
) -> Array:
    """``x W``, of an adapted weight ``x W + s (x A) B``.

    A and B are cast to the dtype of `x` at each use, as weights are; their products are
    rounded to it. They are sharded as the axes of W are, so that where `dot` gives partial sums
    over ``tp`` or ``etp``, they give partial sums too.

    Args:
      dot, dot_a, dot_b: the products with W, A and B.
    """
    if not isinstance(weight, Adapted):
        return dot(x, weight)
    low_rank = dot_a(x, weight.a.astype(x.dtype)) * weight.scale
    return dot(x, weight.base) + dot_b(low_rank, weight.b.astype(x.dtype))


def with_adapters(plain: Tree, config: ModelConfig) -> Tree:
    """The table of weights with adapters: all frozen but for a value head, and each target
    replaced by an `Adapted` of three.

    A starts normal with variance ``1 / (3 fan-in)``, as PEFT's uniform start has, and B with
    zeros: training starts at the frozen weights.

    Args:
      plain: the table without adapters, `moe.weights.Weight`s.
    """
    lora = config.lora
    if lora is None:
        return plain

    def adapt(path: Any, weight: Any) -> Any:
        names = _names(path)
        if names == ["head"] and config.head == "value":
            return weight
        base = replace(weight, frozen=True)
        target = _target_of(names, config)
        if target is None or not lora.has_target(target):
            return base
        axes, in_axes = weight.axes.split(), weight.fan_in.split()
        # PEFT adapts gate and up of a dense layer separately, and gate and up of stacked experts as
        # the one parameter that they are there: with the same shapes, its files can be loaded.
        stacks = STACKS if "expert" in axes else (*STACKS, "half")
        stack = [axis for axis in axes if axis in stacks]
        out_axes = [axis for axis in axes if axis not in (*stack, *in_axes)]
        new = replace(weight, sampled_along=None, float32=True)
        a = " ".join([*stack, *in_axes, "lora_rank"])
        b = " ".join([*stack, "lora_rank", *out_axes])
        return Adapted(
            base=base,
            a=replace(new, axes=a, scale=1 / math.sqrt(3)),
            b=replace(new, axes=b, fan_in="", scale=0.0),
            scale=lora.scale,
        )

    return jax.tree_util.tree_map_with_path(adapt, plain)


def weights_in(plain: Any, config: ModelConfig) -> dict[str, list[int]]:
    """The weights that may have adapters, as targets of their own, from a network's table before
    adapters: which of its leaves they are."""
    weights: dict[str, list[int]] = {}
    for index, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(plain)):
        if (target := _target_of(_names(path), config)) is not None:
            weights.setdefault(target, []).append(index)
    return weights


def _names(path: Any) -> list[str]:
    return [entry.name for entry in path]


def _target_of(names: Sequence[str], config: ModelConfig) -> str | None:
    """A weight as a target of its own, None if it can have no adapters."""
    if list(names) == ["head"]:
        return "head" if config.head == "untied" else None
    record, name = names[-2:] if len(names) > 1 else ("", names[-1])
    if name not in MATRICES.get(record, ()):
        return None
    is_shared_expert = record == "dense" and names[0] == "layers" and config.num_experts
    return f"{'shared' if is_shared_expert else record}.{name}"


def select_trained(tree: Tree, statement: Any) -> Tree:
    """The leaves of the trained weights; None in place of each frozen leaf."""
    return _select(tree, statement, frozen=False)


def select_frozen(tree: Tree, statement: Any) -> Tree:
    """The leaves of the frozen weights; None in place of each trained leaf."""
    return _select(tree, statement, frozen=True)


def _select(tree: Tree, statement: Any, *, frozen: bool) -> Tree:
    return jax.tree.map(
        lambda weight, leaf: leaf if weight.frozen == frozen else None, statement, tree
    )


def combine_trees(selected: Tree, others: Tree) -> Tree:
    """Merges the trees of `select_trained` and `select_frozen` again: leaves of `others` where
    `selected` has None."""
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        selected,
        others,
        is_leaf=lambda node: node is None,
    )


def with_base(base: Any, learned: Tree, statement: Any) -> Tree:
    """The weights of a network with adapters, from base weights and trained leaves.

    Args:
      base: weights of the network without adapters; its head is ignored if the network's head is
        trained.
      learned: the trained leaves, as `select_trained` gives them.
    """
    head = statement.head
    if head is not None and not is_adapted(head) and not head.frozen:
        base = replace(base, head=None)

    def wrap(weight: Any, leaf: Any) -> Any:
        return Adapted(leaf, None, None, weight.scale) if is_adapted(weight) else leaf

    return combine_trees(learned, jax.tree.map(wrap, statement, base, is_leaf=is_adapted))


def without_adapters(weights: Any) -> Any:
    """The base weights alone: the same arrays, without adapters."""
    return jax.tree.map(
        lambda node: node.base if is_adapted(node) else node, weights, is_leaf=is_adapted
    )


def merge_adapters(weights: Any, statement: Any) -> Any:
    """``W + s A B`` in the place of each adapted weight, computed in float32 and rounded to the
    dtype of W once; all others as they are."""

    def merge_leaf(weight: Any, leaf: Any) -> Any:
        if not is_adapted(weight):
            return leaf
        low_rank = _low_rank(leaf, weight)
        return (leaf.base.astype(jnp.float32) + low_rank).astype(leaf.base.dtype)

    return jax.tree.map(merge_leaf, statement, weights, is_leaf=is_adapted)


def has_adapters(weights: Any) -> bool:
    """True if any of the weights is an adapted one."""
    return any(map(is_adapted, jax.tree.leaves(weights, is_leaf=is_adapted)))


def is_adapted(node: Any) -> bool:
    """True if a node of a record is an adapted weight."""
    return isinstance(node, Adapted)


def _low_rank(leaf: Adapted[Array], specs: Adapted[Any]) -> Array:
    """``s A B`` in the axes of W, multiplied in float32 at highest precision on every device."""
    letters: Iterator[str] = map(chr, count(ord("a")))
    letter_of: dict[str, str] = {}

    def subscripts_of(axes: str) -> str:
        return "".join(letter_of.setdefault(axis, next(letters)) for axis in axes.split())

    a = subscripts_of(specs.a.axes)
    b = subscripts_of(specs.b.axes)
    w = subscripts_of(specs.base.axes)
    summed = jnp.einsum(f"{a},{b}->{w}", leaf.a, leaf.b, precision=jax.lax.Precision.HIGHEST)
    return summed * leaf.scale
