"""ZeRO: what belongs to a weight is spread over the devices that hold the same weight.

Stage 1: the gradients of those devices are summed, and each of them needs its shard of the sum
alone: one reduce-scatter, a step of the optimizer on the shards, and an all-gather of the new
weights. Stage 3 (fully sharded data parallelism, FSDP) leaves the weights in shards too, and
unshards them where they are used.

References:
  Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
  section 5 (stage 1 communicates as much as an all-reduce, stage 3 half as much again).
  https://arxiv.org/abs/1910.02054
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from sharding.collectives import Axes
from sharding.folding import FoldedMesh

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class ShardDim:
    """How a weight is cut into shards.

    Attributes:
      dim: the dimension, counted from the end, so that it is the same for one of a stack.
      atoms: the mesh axes over which; none if it stays whole.
    """

    dim: int
    atoms: Axes


def replica_axes(spec: PartitionSpec, mesh: FoldedMesh) -> Axes:
    """The atoms along which devices hold the same part of a weight, slowest first.

    Of a weight of attention these are ``dp x cp``, and ``tp`` too where ``tp`` does not split it;
    of an expert they are ``edp``.
    """
    # A dimension over one atom is written as its name alone.
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    spread = {atom for entry in entries for atom in entry}
    return tuple(atom for atom in mesh.axes if atom not in spread)


def shard_dim(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: FoldedMesh, first: int = 0
) -> ShardDim:
    """The dimension of a weight that its optimizer state is cut along, over which `replica_axes`.

    It is the dimension, whole in the weight, that can be cut over the most devices, the first of
    equals. No atoms are left over where it divides by all the replicas; those that it does not
    divide by hold the same shards.

    Args:
      spec: where the weight lives.
      shape: of the whole weight.
      first: dimensions in front that are not to be cut.
    """
    spec = PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))
    # A dimension that tp, ep or pp splits already could be split further only by moving elements.
    whole = [dim for dim, entry in enumerate(spec) if entry is None and dim >= first]
    atoms = {dim: _atoms_that_divide(shape[dim], replica_axes(spec, mesh), mesh) for dim in whole}
    best = max(whole, key=lambda dim: mesh.size(atoms[dim]), default=None)
    return ShardDim(-1, ()) if best is None else ShardDim(best - len(shape), atoms[best])


def shard_spec(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: FoldedMesh, first: int = 0
) -> PartitionSpec:
    """Where the optimizer state of a weight lives: `spec`, cut along its `shard_dim` too."""
    cut = shard_dim(spec, shape, mesh, first)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    if cut.atoms:
        entries[cut.dim] = cut.atoms
    return PartitionSpec(*entries)


def reduce_scatter(
    mesh: FoldedMesh, spec: PartitionSpec, cut: ShardDim, gradient: Array, is_sharded: bool = False
) -> Array:
    """The gradient summed over all `replica_axes`, of which each device keeps its shard.

    Runs inside the `jax.shard_map`; the result lives where `shard_spec` says. Volume sent, of a
    gradient of G numbers and n replicas: ``G (n-1)/n``, half of what the sum on every device takes.

    Args:
      spec: where the weight lives.
      cut: how it is cut.
      gradient: of this device alone, varying over every axis.
      is_sharded: the gradient is that of shards, which the transpose of `unshard` has summed over
        the devices of the cut.
    """
    if cut.atoms and not is_sharded:
        dim = gradient.ndim + cut.dim
        gradient = lax.psum_scatter(gradient, cut.atoms, scatter_dimension=dim, tiled=True)
    # Replicas that no dimension divides by keep the whole sum.
    return lax.psum(gradient, tuple(a for a in replica_axes(spec, mesh) if a not in cut.atoms))


def unshard(shards: Tree, shard_dims: Any) -> Tree:
    """Whole weights from the shards that devices hold; `shard_dims` has a `ShardDim` for each.

    Runs inside the `jax.shard_map`, on shards that vary over the devices of the cut; its gradient,
    a reduce-scatter, sums those of the devices into shards: so FSDP needs no backward pass of its
    own. It sums in float32, whatever dtype the shards are gathered in, and rounds to that once.
    Volume sent, of a weight of W numbers in n shards: ``W (n-1)/n`` in the dtype of the shards, and
    as many float32 numbers by the gradient.
    """

    def whole(shard: Array, cut: ShardDim) -> Array:
        return _gathered(shard, cut, shard.dtype) if cut.atoms else shard

    return jax.tree.map(whole, shards, shard_dims)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(shard: Array, cut: ShardDim, dtype: Any) -> Array:
    return _gather(shard, cut, dtype)[0]


def _gather(shard: Array, cut: ShardDim, dtype: Any) -> tuple[Array, None]:
    return lax.all_gather(shard, cut.atoms, axis=shard.ndim + cut.dim, tiled=True), None


def _scatter(cut: ShardDim, dtype: Any, _: None, gradient: Array) -> tuple[Array]:
    wide = gradient.astype(jnp.float32)
    dim = wide.ndim + cut.dim
    summed = lax.psum_scatter(wide, cut.atoms, scatter_dimension=dim, tiled=True)
    return (summed.astype(dtype),)


_gathered.defvjp(_gather, _scatter)


def _atoms_that_divide(size: int, atoms: Axes, mesh: FoldedMesh) -> Axes:
    """Those of the atoms over which `size` can be cut into the most shards."""
    atoms = tuple(atom for atom in atoms if mesh.size((atom,)) > 1)
    choices = (some for n in range(len(atoms) + 1) for some in itertools.combinations(atoms, n))
    return max((some for some in choices if size % mesh.size(some) == 0), key=mesh.size)
