"""Folded mesh of a layout, over real devices or as an abstract mesh, its atomic axes, and the
PartitionSpec of a weight from its named axes."""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from sharding.folding.layout import ATTENTION, EXPERT, Layout, prime_factors


@dataclass(frozen=True)
class Atom:
    """An atomic mesh axis: its size, and the logical axes it belongs to."""

    owners: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        return "_".join(self.owners)


@dataclass(frozen=True)
class FoldedMesh:
    """One JAX mesh of atomic axes, and each logical axis as a tuple of them.

    Size-1 axes are atoms like any other, so no code checks for the existence of an axis.
    """

    layout: Layout
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    tp: tuple[str, ...]
    cp: tuple[str, ...]
    dp: tuple[str, ...]
    pp: tuple[str, ...]
    ep: tuple[str, ...]
    etp: tuple[str, ...]
    edp: tuple[str, ...]
    platform: str | None = None
    """Platform of the devices ("cpu", "gpu", "tpu"); may be None for an abstract mesh."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Every atom, slowest first."""
        return tuple(self.mesh.axis_names)

    @property
    def sequence(self) -> tuple[str, ...]:
        """The atoms of ``cp`` and ``tp``: along them devices hold shards of the same sequences."""
        return (*self.cp, *self.tp)

    @property
    def except_sequence(self) -> tuple[str, ...]:
        """Every atom outside `sequence`, for example the data-parallel ones: along them devices
        have different sequences or pipeline stages."""
        return tuple(axis for axis in self.axes if axis not in self.sequence)

    def size(self, axes: Sequence[str]) -> int:
        """Number of devices along `axes`, the product of their sizes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


def fold(layout: Layout, devices: Sequence[Any] | None = None) -> FoldedMesh:
    """Folds devices into the mesh of a layout.

    Ranks follow Megatron-Core's order: ``pp`` outermost, then ``dp``, ``cp``, ``tp`` fastest; on
    the expert side ``edp``, ``ep``, ``etp``. If those two orders have no common refinement, prime
    factors of the sizes are paired: attention keeps this order, and the ranks of an expert group
    differ from Megatron-Core's.

    Args:
      layout: sizes of the parallel axes.
      devices: rank r is the r-th; None is all of `jax.devices()`.

    Returns:
      The mesh, with the platform of the first device.

    Raises:
      ValueError: if the number of devices differs from the layout's.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != layout.num_devices:
        raise ValueError(
            f"layout {layout} needs {layout.num_devices} devices but {len(devices)} were given: "
            "change a size, or pass that many devices."
        )
    folded = fold_abstract(layout, devices[0].platform)
    mesh = jax.sharding.Mesh(
        np.asarray(devices).reshape(folded.mesh.axis_sizes),
        folded.axes,
        axis_types=folded.mesh.axis_types,
    )
    return replace(folded, mesh=mesh)


def fold_abstract(layout: Layout, platform: str | None = None) -> FoldedMesh:
    """Abstract mesh of a layout, without devices, for tracing and for shardings.

    Args:
      platform: platform of the devices ("cpu", "gpu", "tpu") for which implementations are chosen.
    """
    atoms = atoms_of(layout)
    mesh = jax.sharding.AbstractMesh(
        tuple(atom.size for atom in atoms),
        tuple(atom.name for atom in atoms),
        axis_types=(jax.sharding.AxisType.Auto,) * len(atoms),
    )
    logical = {
        axis: tuple(atom.name for atom in atoms if axis in atom.owners)
        for axis in ("pp", *ATTENTION, *EXPERT)
    }
    return FoldedMesh(layout, mesh, **logical, platform=platform)


def atoms_of(layout: Layout) -> list[Atom]:
    """Atoms of the layout, slowest first: ``pp``, the common refinement, then the size-1 axes."""
    refined = _refine(layout)
    if refined is None:
        refined = _pair_primes(layout)
    ones = [Atom((axis,), 1) for axis in (*ATTENTION, *EXPERT) if getattr(layout, axis) == 1]
    return [Atom(("pp",), layout.pp), *refined, *ones]


def _refine(layout: Layout) -> list[Atom] | None:
    """The common refinement of the two factorisations in rank order, or None if there is none.

    Both factorisations split the same range of ranks at their cumulative products. The union of
    their split points is a factorisation again exactly when each divides the next.
    """
    strides = {1}
    for axes in (ATTENTION, EXPERT):
        strides |= set(
            itertools.accumulate((getattr(layout, a) for a in reversed(axes)), operator.mul)
        )
    sizes = sorted(strides)
    if any(larger % smaller for smaller, larger in itertools.pairwise(sizes)):
        return None
    atoms = [
        Atom((_owner(layout, ATTENTION, low), _owner(layout, EXPERT, low)), high // low)
        for low, high in itertools.pairwise(sizes)
    ]
    return atoms[::-1]


def _owner(layout: Layout, axes: tuple[str, ...], stride: int) -> str:
    """The axis among `axes` whose ranks are `stride` apart or that `stride` falls inside."""
    size = 1
    for axis in reversed(axes):
        size *= getattr(layout, axis)
        if stride < size:
            return axis
    raise AssertionError(f"stride {stride} is outside {size} ranks")


def _pair_primes(layout: Layout) -> list[Atom]:
    """Atoms from paired prime factors of attention's and experts' axes, fastest axes first."""
    sizes: dict[tuple[str, str], int] = {}
    for prime in sorted(set(prime_factors(layout.num_devices // layout.pp))):
        axes_by_prime = [
            [
                axis
                for axis in reversed(axes)
                for _ in range(prime_factors(getattr(layout, axis)).count(prime))
            ]
            for axes in (ATTENTION, EXPERT)
        ]
        for owners in zip(*axes_by_prime, strict=True):
            sizes[owners] = sizes.get(owners, 1) * prime
    order = [pair for pair in itertools.product(ATTENTION, EXPERT) if pair in sizes]
    return [Atom(pair, sizes[pair]) for pair in order]


Rules = Mapping[str, tuple[str, ...]]


def weight_rules(mesh: FoldedMesh) -> Rules:
    """Mesh axes over which each named axis of a weight is sharded; other axes are replicated.

    Layers are sharded over ``pp``; heads, the hidden units of dense layers and the vocabulary, rows
    of the embedding and columns of the head, over ``tp``; experts over ``ep`` and the hidden units
    of each over ``etp``.
    """
    return {
        "layer": mesh.pp,
        "attention_layer": mesh.pp,
        "delta_layer": mesh.pp,
        "head": mesh.tp,
        "kv_head": mesh.tp,
        "delta_key_head": mesh.tp,
        "delta_value_head": mesh.tp,
        "d_ff": mesh.tp,
        "dense_d_ff": mesh.tp,
        "vocab": mesh.tp,
        "expert": mesh.ep,
        "d_expert": mesh.etp,
    }


def partition_spec(axes: str, rules: Rules) -> PartitionSpec:
    """The PartitionSpec of a weight whose axes are `axes`, for example ``"expert d_model d_ff"``.

    Raises:
      ValueError: when two axes of the weight would be sharded over the same mesh axis.
    """
    owner: dict[str, str] = {}
    entries = []
    for axis in axes.split():
        atoms = rules.get(axis, ())
        for atom in atoms:
            if atom in owner:
                raise ValueError(
                    f"rules map both {owner[atom]!r} and {axis!r} of weight {axes!r} "
                    f"to mesh axis {atom!r}; a mesh axis can shard only one of them."
                )
            owner[atom] = axis
        entries.append(atoms or None)
    return PartitionSpec(*entries)
