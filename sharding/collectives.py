"""Collectives, each over a logical axis given as a tuple of atomic mesh axes.

They run inside the one `jax.shard_map`. Arrays there are typed by the axes they vary over; a
collective over axes the array does not vary over yet is preceded by `vary`.

Their results have checkpoint names, `COLLECTIVE` or the caller's, and `SUM`: by these `moe.remat`
saves them for the backward pass, so that rematerialisation starts from them.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Shaped

Axes = tuple[str, ...]
IndexGroups = tuple[tuple[int, ...], ...]
"""Groups of indices along axes: `axis_index_groups` of JAX's collectives."""
Tree = TypeVar("Tree")

COLLECTIVE = "collective"
"""Checkpoint name of a collective's result, for policies of `jax.checkpoint`."""

SUM = "sum"
"""Checkpoint name of small sums over devices, for example one number per token or expert."""


def _name_result(x: Array, name: str = COLLECTIVE) -> Array:
    return checkpoint_name(x, name)


def varying(x: Array) -> frozenset[str]:
    """The mesh axes over which `x` may differ, as its type says inside `jax.shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def vary(tree: Tree, axes: Axes) -> Tree:
    """`tree` typed as varying over `axes`, values unchanged. The gradient is summed over them."""

    def cast(leaf):
        missing = tuple(axis for axis in axes if axis not in varying(leaf))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def match_varying(tree: Tree, *others: object) -> Tree:
    """`tree` typed as varying over every mesh axis that an array of it or of `others` varies over.

    Carries of loops, results of branches and inputs of gradient rules must be of one type. None
    stays None.
    """
    arrays = [x for x in jax.tree.leaves((tree, others)) if isinstance(x, jax.Array)]
    return vary(tree, tuple(sorted(frozenset[str]().union(*map(varying, arrays)))))


def typed_zeros(shapes: Tree) -> Tree:
    """Zeros of the types that `jax.eval_shape` gives, with the mesh axes that each varies over."""

    def zeros(x: Any) -> Array:
        return vary(jnp.zeros(x.shape, x.dtype), tuple(sorted(x.manual_axis_type.varying)))

    return jax.tree.map(zeros, shapes)


def all_sum(tree: Tree, axes: Axes) -> Tree:
    """All-reduce: the sum over `axes`, equal on every device along them.

    Volume: 2 (n-1)/n of the array.
    """
    return jax.tree.map(lambda leaf: _name_result(lax.psum(vary(leaf, axes), axes), SUM), tree)


def gather_tokens(
    x: Shaped[Array, "local *rest"],
    axes: Axes,
    name: str = COLLECTIVE,
    groups: IndexGroups | None = None,
) -> Shaped[Array, "all *rest"]:
    """All-gather: concatenates shards ``[tokens / n, ...]``.

    Volume received: (n-1) shards.

    Args:
      groups: as in `all_to_all`.
    """
    x = vary(x, axes)
    # The compiler would keep the gather of one shard: a copy.
    if lax.axis_size(axes) == 1:
        return x
    return _name_result(lax.all_gather(x, axes, axis=0, tiled=True, axis_index_groups=groups), name)


def scatter_tokens(x: Shaped[Array, "all *rest"], axes: Axes) -> Shaped[Array, "local *rest"]:
    """Reduce-scatter: the sum over `axes`; each device keeps its shard of the first dimension.

    The reverse of `gather_tokens`, and its gradient. Volume sent: (n-1)/n of the array.
    """
    x = vary(x, axes)
    if lax.axis_size(axes) == 1:
        return x
    return _name_result(lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True))


def with_transpose(
    function: Callable[[Array], Array], transpose: Callable[[Array], Array]
) -> Callable[[Array], Array]:
    """`function`, linear but for rounding, with `transpose` as its gradient rule."""
    differentiable = jax.custom_vjp(function)
    # Not by calling `differentiable`, which would hide the checkpoint names of its results.
    differentiable.defvjp(lambda x: (function(x), None), lambda _, gradient: (transpose(gradient),))
    return differentiable


def gather_and_widen(
    x: Shaped[Array, "local *rest"], axes: Axes, name: str = COLLECTIVE
) -> Shaped[Array, "all *rest"]:
    """`gather_tokens` in the dtype of `x`, returned as float32.

    Its gradient is summed in float32 and rounded once. Volume received: (n-1) shards; by the
    gradient as many elements, of float32.
    """
    dtype = x.dtype

    def gather(x: Array) -> Array:
        return gather_tokens(x, axes, name).astype(jnp.float32)

    def scatter(gradient: Array) -> Array:
        return scatter_tokens(gradient, axes).astype(dtype)

    return with_transpose(gather, scatter)(vary(x, axes))


def scatter_and_round(
    x: Shaped[Array, "all *rest"], axes: Axes, dtype: Any
) -> Shaped[Array, "local *rest"]:
    """`scatter_tokens` of float32 terms, rounded to `dtype` after the sum.

    The reverse of `gather_and_widen`, and its gradient.
    """

    def scatter(x: Array) -> Array:
        return scatter_tokens(x, axes).astype(dtype)

    def gather(gradient: Array) -> Array:
        return gather_tokens(gradient, axes).astype(jnp.float32)

    return with_transpose(scatter, gather)(vary(x, axes))


def local_shard(x: Shaped[Array, "all *rest"], axes: Axes) -> Shaped[Array, "local *rest"]:
    """This device's shard of the first dimension of an array replicated along `axes`."""
    size = x.shape[0] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(vary(x, axes), lax.axis_index(axes) * size, size)


def join_shards(x: Shaped[Array, "local *rest"], axes: Axes) -> Shaped[Array, "all *rest"]:
    """`gather_tokens` whose result is typed as equal on every device along `axes`.

    It is one all-reduce, so that a loss computed from it counts once. For small arrays (a number
    per token): volume 2 (n-1)/n of the full array.
    """
    n = lax.axis_size(axes)
    full = match_varying(jnp.zeros((x.shape[0] * n, *x.shape[1:]), x.dtype), x)
    start = lax.axis_index(axes) * x.shape[0]
    full = lax.dynamic_update_slice_in_dim(vary(full, axes), vary(x, axes), start, axis=0)
    return _name_result(lax.psum(full, axes), SUM)


def all_to_all(
    x: Shaped[Array, "peers *rest"],
    axes: Axes,
    name: str = COLLECTIVE,
    groups: IndexGroups | None = None,
) -> Shaped[Array, "peers *rest"]:
    """Row ``i`` goes to device ``i`` along `axes`; row ``j`` of the result came from device ``j``.

    Volume sent: (n-1)/n of the array. It is its own reverse.

    Args:
      groups: groups of n indices along `axes` that exchange among themselves; None is all of them.
    """
    x = lax.all_to_all(
        vary(x, axes), axes, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=groups
    )
    return _name_result(x, name)


def index_in_group(axes: Axes, groups: IndexGroups | None = None) -> Array:
    """Index of this device in its group of indices along `axes`; None is one group of all."""
    index = lax.axis_index(axes)
    if groups is None:
        return index
    ranks = {member: rank for group in groups for rank, member in enumerate(group)}
    return jnp.asarray([ranks[member] for member in sorted(ranks)], index.dtype)[index]


def swap_shards(
    x: Shaped[Array, "a b *rest"], axes: Axes, split: int, join: int
) -> Shaped[Array, "c d *rest"]:
    """All-to-all from shards of the dimension `join` to shards of the dimension `split`.

    Volume sent: (n-1)/n of the array. Its reverse swaps the two dimensions.
    """
    x = vary(x, axes)
    if lax.axis_size(axes) == 1:
        return x
    return _name_result(lax.all_to_all(x, axes, split_axis=split, concat_axis=join, tiled=True))


def shift(x: Shaped[Array, "*shape"], axes: Axes) -> Shaped[Array, "*shape"]:
    """Ring shift: the array of the device before this one along `axes`; the first gets the last's.

    Volume sent: the array.
    """
    x, n = vary(x, axes), lax.axis_size(axes)
    # The compiler would keep the permute of one device: a copy.
    if n == 1:
        return x
    return _name_result(lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)]))


def digit_neighbour(
    x: Shaped[Array, "*shape"], axes: Axes, radix: int, stride: int, back: int = 1
) -> Shaped[Array, "*shape"]:
    """Array of the device whose rank along `axes` has one digit `back` less, modulo `radix`.

    A collective over groups of `radix` devices that are `stride` ranks apart, where `shift` is a
    collective of all devices of the program. Volume received: radix - 1 times the array.
    """
    groups = [
        [start + digit * stride for digit in range(radix)]
        for start in range(lax.axis_size(axes))
        if start // stride % radix == 0
    ]
    shards = lax.all_gather(vary(x, axes), axes, axis_index_groups=groups)
    digit = (lax.axis_index(axes) // stride - back) % radix
    return _name_result(lax.dynamic_index_in_dim(shards, digit, keepdims=False))
