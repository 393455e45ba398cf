"""Split and merge of weight trees with adapters.

`statement` is the table of the network (`moe.weights.table`), which says which weights are frozen
and which have adapters.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moe.adapters.adapted import Adapted

Tree = TypeVar("Tree")


def select_trained(tree: Tree, statement: Any) -> Tree:
    """The leaves of the trained weights; None in place of those of the frozen ones."""
    return _select(tree, statement, frozen=False)


def select_frozen(tree: Tree, statement: Any) -> Tree:
    """The leaves of the frozen weights; None in place of those of the trained ones."""
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
      base: weights of the network without adapters; its head is ignored where that of the network
        is trained.
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
