"""ZeRO-1: the optimiser state of a weight is spread over the devices that hold the same weight.

The gradients of those devices are summed, and each of them needs its part of the sum alone: one
reduce-scatter, a step of the optimiser on the parts, and an all-gather of the new weights.

References:
  Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
  section 5.1 (stage 1, whose communication is that of an all-reduce).
  https://arxiv.org/abs/1910.02054
"""

import itertools

from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from sharding.collectives import Axes
from sharding.folding import FoldedMesh


def copies(spec: PartitionSpec, mesh: FoldedMesh) -> Axes:
    """The atoms along which devices hold the same part of a weight, slowest first.

    Of a weight of attention these are ``dp x cp``, and ``tp`` too where ``tp`` does not split it;
    of an expert they are ``edp``.
    """
    # A dimension over one atom is written as its name alone.
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in spec)
    spread = {atom for entry in entries for atom in entry}
    return tuple(atom for atom in mesh.axes if atom not in spread)


def split(spec: PartitionSpec, shape: tuple[int, ...], mesh: FoldedMesh) -> tuple[int, Axes]:
    """The dimension of a weight that its optimiser state is cut along, and over which of `copies`.

    It is the dimension, whole in the weight, that can be cut over the most devices, the first of
    equals. No atoms are left over where it divides by all the copies; those that it does not divide
    by hold the same parts.

    Args:
      spec: where the weight lives.
      shape: of the weight, or of a device's part of it, which agree where `spec` is None.

    Returns:
      The dimension and its atoms, ``(0, ())`` where there is nothing to cut or to cut over.
    """
    spec = PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))
    whole = [axis for axis, entry in enumerate(spec) if entry is None]
    cuts = {axis: _atoms_that_divide(shape[axis], copies(spec, mesh), mesh) for axis in whole}
    best = max(whole, key=lambda axis: mesh.size(cuts[axis]), default=None)
    return (0, ()) if best is None or not cuts[best] else (best, cuts[best])


def parts(spec: PartitionSpec, shape: tuple[int, ...], mesh: FoldedMesh) -> PartitionSpec:
    """Where the optimiser state of a weight lives: `spec` with the cut of `split`."""
    axis, atoms = split(spec, shape, mesh)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return PartitionSpec(*(atoms if i == axis and atoms else e for i, e in enumerate(entries)))


def sum_to_parts(gradient: Array, spec: PartitionSpec, mesh: FoldedMesh) -> Array:
    """The gradient summed over all `copies`, of which each device keeps its part.

    Runs inside the `jax.shard_map`; the result lives where `parts` says. Volume sent, of a gradient
    of G numbers and n copies: ``G (n-1)/n``, half of what the sum on every device takes.

    Args:
      gradient: of this device alone, varying over every axis.
      spec: where the weight lives.
    """
    axis, atoms = split(spec, gradient.shape, mesh)
    if atoms:
        gradient = lax.psum_scatter(gradient, atoms, scatter_dimension=axis, tiled=True)
    return lax.psum(gradient, tuple(a for a in copies(spec, mesh) if a not in atoms))


def _atoms_that_divide(size: int, atoms: Axes, mesh: FoldedMesh) -> Axes:
    """Those of the atoms over which `size` can be cut into the most parts."""
    atoms = tuple(atom for atom in atoms if mesh.size((atom,)) > 1)
    choices = (some for n in range(len(atoms) + 1) for some in itertools.combinations(atoms, n))
    return max((some for some in choices if size % mesh.size(some) == 0), key=mesh.size)
