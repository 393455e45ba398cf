"""ZeRO: what belongs to a weight is spread over the devices that hold the same weight.

Stage 1: the gradients of those devices are summed, and each of them needs its part of the sum
alone: one reduce-scatter, a step of the optimiser on the parts, and an all-gather of the new
weights. Stage 3 (fully sharded data parallelism) leaves the weights in parts too, and joins them
where they are used.

References:
  Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
  section 5 (stage 1 communicates as much as an all-reduce, stage 3 half as much again).
  https://arxiv.org/abs/1910.02054
"""

import itertools
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from sharding.collectives import Axes
from sharding.folding import FoldedMesh

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Cut:
    """How a weight is cut into parts.

    Attributes:
      axis: the dimension, counted from the end, so that it is the same for one of a stack.
      atoms: the mesh axes over which; none if it stays whole.
    """

    axis: int
    atoms: Axes


def copies(spec: PartitionSpec, mesh: FoldedMesh) -> Axes:
    """The atoms along which devices hold the same part of a weight, slowest first.

    Of a weight of attention these are ``dp x cp``, and ``tp`` too where ``tp`` does not split it;
    of an expert they are ``edp``.
    """
    # A dimension over one atom is written as its name alone.
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    spread = {atom for entry in entries for atom in entry}
    return tuple(atom for atom in mesh.axes if atom not in spread)


def cut_of(spec: PartitionSpec, shape: tuple[int, ...], mesh: FoldedMesh, first: int = 0) -> Cut:
    """The dimension of a weight that its optimiser state is cut along, and over which of `copies`.

    It is the dimension, whole in the weight, that can be cut over the most devices, the first of
    equals. No atoms are left over where it divides by all the copies; those that it does not divide
    by hold the same parts.

    Args:
      spec: where the weight lives.
      shape: of the whole weight.
      first: dimensions in front that are not to be cut.
    """
    spec = PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))
    whole = [axis for axis, entry in enumerate(spec) if entry is None and axis >= first]
    cuts = {axis: _atoms_that_divide(shape[axis], copies(spec, mesh), mesh) for axis in whole}
    best = max(whole, key=lambda axis: mesh.size(cuts[axis]), default=None)
    return Cut(-1, ()) if best is None else Cut(best - len(shape), cuts[best])


def parts(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: FoldedMesh, first: int = 0
) -> PartitionSpec:
    """Where the optimiser state of a weight lives: `spec` with the cut of `cut_of`."""
    cut = cut_of(spec, shape, mesh, first)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    if cut.atoms:
        entries[cut.axis] = cut.atoms
    return PartitionSpec(*entries)


def sum_to_parts(
    mesh: FoldedMesh, spec: PartitionSpec, cut: Cut, gradient: Array, in_parts: bool = False
) -> Array:
    """The gradient summed over all `copies`, of which each device keeps its part.

    Runs inside the `jax.shard_map`; the result lives where `parts` says. Volume sent, of a gradient
    of G numbers and n copies: ``G (n-1)/n``, half of what the sum on every device takes.

    Args:
      spec: where the weight lives.
      cut: how it is cut.
      gradient: of this device alone, varying over every axis.
      in_parts: the gradient is that of parts, which the transpose of `join` has summed over the
        devices of the cut.
    """
    if cut.atoms and not in_parts:
        axis = gradient.ndim + cut.axis
        gradient = lax.psum_scatter(gradient, cut.atoms, scatter_dimension=axis, tiled=True)
    return lax.psum(gradient, tuple(a for a in copies(spec, mesh) if a not in cut.atoms))


def join(weights: Tree, cuts: Any) -> Tree:
    """Whole weights from the parts that the devices of each cut hold; `cuts` has a `Cut` for each.

    Runs inside the `jax.shard_map`; its transpose sums the gradients of those devices into parts.
    Volume sent, of a weight of W numbers in n parts: ``W (n-1)/n``, and as much by the transpose.
    """

    def whole(part: Array, cut: Cut) -> Array:
        if not cut.atoms:
            return part
        return lax.all_gather(part, cut.atoms, axis=part.ndim + cut.axis, tiled=True)

    return jax.tree.map(whole, weights, cuts)


def _atoms_that_divide(size: int, atoms: Axes, mesh: FoldedMesh) -> Axes:
    """Those of the atoms over which `size` can be cut into the most parts."""
    atoms = tuple(atom for atom in atoms if mesh.size((atom,)) > 1)
    choices = (some for n in range(len(atoms) + 1) for some in itertools.combinations(atoms, n))
    return max((some for some in choices if size % mesh.size(some) == 0), key=mesh.size)
