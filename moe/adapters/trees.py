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


def trained(tree: Tree, statement: Any) -> Tree:
    """The leaves of the trained weights; None in place of those of the frozen ones."""
    return _some(tree, statement, fixed=False)


def fixed(tree: Tree, statement: Any) -> Tree:
    """The leaves of the frozen weights; None in place of those of the trained ones."""
    return _some(tree, statement, fixed=True)


def _some(tree: Tree, statement: Any, *, fixed: bool) -> Tree:
    return jax.tree.map(
        lambda weight, leaf: leaf if weight.fixed == fixed else None, statement, tree
    )


def joined(some: Tree, others: Tree) -> Tree:
    """Merges the trees of `trained` and `fixed` again: leaves of `others` where `some` has None."""
    return jax.tree.map(
        lambda one, other: other if one is None else one,
        some,
        others,
        is_leaf=lambda leaf: leaf is None,
    )


def with_base(base: Any, learned: Tree, statement: Any) -> Tree:
    """The weights of a network with adapters, from base weights and trained leaves.

    Args:
      base: weights of the network without adapters; its head is ignored where that of the network
        is trained.
      learned: the trained leaves, as `trained` gives them.
    """
    head = statement.head
    if head is not None and not is_adapted(head) and not head.fixed:
        base = replace(base, head=None)

    def place(weight: Any, leaf: Any) -> Any:
        return Adapted(leaf, None, None, weight.scale) if is_adapted(weight) else leaf

    return joined(learned, jax.tree.map(place, statement, base, is_leaf=is_adapted))


def without_adapters(weights: Any) -> Any:
    """The base weights alone: the same arrays, without adapters."""
    return jax.tree.map(
        lambda node: node.base if is_adapted(node) else node, weights, is_leaf=is_adapted
    )


def merged(weights: Any, statement: Any) -> Any:
    """``W + s A B`` in the place of each adapted weight, computed in float32 and rounded to the
    dtype of W once; all others as they are."""

    def one(weight: Any, leaf: Any) -> Any:
        if not is_adapted(weight):
            return leaf
        added = _low_rank(leaf, weight)
        return (leaf.base.astype(jnp.float32) + added).astype(leaf.base.dtype)

    return jax.tree.map(one, statement, weights, is_leaf=is_adapted)


def has_adapters(weights: Any) -> bool:
    """True if any of the weights is an adapted one."""
    return any(map(is_adapted, jax.tree.leaves(weights, is_leaf=is_adapted)))


def is_adapted(node: Any) -> bool:
    """True if a node of a record is an adapted weight."""
    return isinstance(node, Adapted)


def _low_rank(leaf: Adapted[Array], stated: Adapted[Any]) -> Array:
    """``s A B`` in the axes of W, multiplied in float32 at highest precision on every device."""
    letters: Iterator[str] = map(chr, count(ord("a")))
    letter_of: dict[str, str] = {}

    def spelled(axes: str) -> str:
        return "".join(letter_of.setdefault(axis, next(letters)) for axis in axes.split())

    a, b, w = (spelled(stated.a.axes), spelled(stated.b.axes), spelled(stated.base.axes))
    summed = jnp.einsum(f"{a},{b}->{w}", leaf.a, leaf.b, precision=jax.lax.Precision.HIGHEST)
    return summed * leaf.scale
