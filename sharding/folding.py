"""A layout of the devices, and the mesh folded from it.

Attention sees the devices as ``pp x dp x cp x tp`` and the experts see *the same devices* as
``pp x edp x ep x etp``. Both are names over one set of atomic mesh axes: a logical axis is a tuple
of atoms, and a collective takes the tuple. Going from attention to experts therefore moves nothing.
"""

import itertools
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

ATTENTION = ("dp", "cp", "tp")
"""Axes of attention below the pipeline, slowest first (the rank order of Megatron-Core)."""
EXPERT = ("edp", "ep", "etp")
"""Axes of the experts below the pipeline, slowest first."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes. The expert data axis follows from ``tp cp dp == etp ep edp``.

    Args:
      tp: tensor parallelism of attention and dense layers.
      cp: context parallelism.
      dp: data parallelism.
      pp: pipeline stages, shared by attention and experts.
      ep: expert parallelism.
      etp: tensor parallelism inside an expert.
      vpp: chunks of layers on each pipeline stage (virtual stages, the interleaved schedule).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    def __post_init__(self):
        for field in fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise ValueError(
                    f"{field.name}={size} is not a size: use 1 for an axis not in use."
                )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"vpp={self.vpp} interleaves the chunks of a pipeline and pp=1 is none: "
                "give pp as well, or leave vpp out."
            )
        stage = self.tp * self.cp * self.dp
        if stage % (self.ep * self.etp):
            ep, etp = self._nearest_experts(stage)
            raise ValueError(
                f"ep={self.ep} x etp={self.etp} does not divide tp x cp x dp = {stage}: "
                f"the nearest legal expert axis is ep={ep} with etp={etp}."
            )

    def _nearest_experts(self, stage: int) -> tuple[int, int]:
        """The legal sizes of ``ep`` and ``etp`` that are off by the smallest factor."""
        legal = [(ep, etp) for ep in _divisors(stage) for etp in _divisors(stage // ep)]
        return min(legal, key=lambda pair: _factor(pair[0], self.ep) * _factor(pair[1], self.etp))

    @property
    def edp(self) -> int:
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def num_devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout written as ``"tp2 dp2 / ep4"``; axes not named have size 1.

        ``edp`` may be named too, as `str` does; it must be what follows from the others.

        Raises:
          ValueError: on an unknown axis, an axis named twice, or sizes that cannot agree.
        """
        sizes: dict[str, int] = {}
        names = [*(field.name for field in fields(cls)), "edp"]
        for word in text.replace("/", " ").split():
            match = re.fullmatch(r"([a-z]+)(\d+)", word)
            if match is None or match[1] not in names:
                raise ValueError(
                    f"layout {text!r}: {word!r} is not an axis and a size; "
                    f'write for example "tp2 dp2 / ep4" with axes among {", ".join(names)}.'
                )
            if match[1] in sizes:
                raise ValueError(f"layout {text!r} names the axis {match[1]} twice.")
            sizes[match[1]] = int(match[2])
        edp = sizes.pop("edp", None)
        layout = cls(**sizes)
        if edp not in (None, layout.edp):
            raise ValueError(
                f"layout {text!r}: edp={edp}, but the other sizes leave edp={layout.edp}: "
                "leave it out."
            )
        return layout

    def __str__(self) -> str:
        attention = " ".join(f"{axis}{getattr(self, axis)}" for axis in ("tp", "cp", "dp", "pp"))
        if self.vpp > 1:
            attention += f" vpp{self.vpp}"
        return f"{attention} / ep{self.ep} etp{self.etp} edp{self.edp}"


@dataclass(frozen=True)
class FoldedMesh:
    """One JAX mesh of atomic axes, and each logical axis as a tuple of them.

    Size-1 axes are atoms like any other, so no code asks whether an axis is there.
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

    @property
    def axes(self) -> tuple[str, ...]:
        """Every atom, slowest first."""
        return tuple(self.mesh.axis_names)

    @property
    def sequence(self) -> tuple[str, ...]:
        """The atoms of ``cp`` and ``tp``: along them devices hold parts of the same sequences."""
        return (*self.cp, *self.tp)

    @property
    def except_sequence(self) -> tuple[str, ...]:
        """Every atom but those of `sequence`, along which the same loss counts once."""
        return tuple(axis for axis in self.axes if axis not in self.sequence)

    def size(self, axes: Sequence[str]) -> int:
        """Devices along `axes` together."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


def fold(layout: Layout, devices: Sequence[Any] | None = None) -> FoldedMesh:
    """The mesh on which `layout` holds, made of `devices` (all of them by default).

    Ranks follow Megatron-Core's order: ``pp`` outermost, then ``dp``, ``cp``, ``tp`` fastest; on
    the expert side ``edp``, ``ep``, ``etp``. Where those two orders have no common refinement, the
    prime factors of the sizes are paired and the attention order is the one kept.

    Raises:
      ValueError: when the number of devices is not that of the layout.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != layout.num_devices:
        raise ValueError(
            f"layout {layout} needs {layout.num_devices} devices and {len(devices)} were given: "
            "change a size, or pass that many devices."
        )
    atoms = _atoms(layout)
    mesh = jax.sharding.Mesh(
        np.asarray(devices).reshape([atom.size for atom in atoms]),
        tuple(atom.name for atom in atoms),
        axis_types=(jax.sharding.AxisType.Auto,) * len(atoms),
    )
    return _folded(layout, mesh, atoms)


def fold_abstract(layout: Layout) -> FoldedMesh:
    """The mesh of `layout` over devices that need not exist, for tracing and for shardings."""
    atoms = _atoms(layout)
    mesh = jax.sharding.AbstractMesh(
        tuple(atom.size for atom in atoms),
        tuple(atom.name for atom in atoms),
        axis_types=(jax.sharding.AxisType.Auto,) * len(atoms),
    )
    return _folded(layout, mesh, atoms)


@dataclass(frozen=True)
class _Atom:
    """An atomic mesh axis: its size, and the logical axes it belongs to."""

    owners: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        return "_".join(self.owners)


def _folded(
    layout: Layout,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    atoms: list[_Atom],
) -> FoldedMesh:
    logical = {
        axis: tuple(atom.name for atom in atoms if axis in atom.owners)
        for axis in ("pp", *ATTENTION, *EXPERT)
    }
    return FoldedMesh(layout, mesh, **logical)


def _atoms(layout: Layout) -> list[_Atom]:
    """Atoms of the layout, slowest first: ``pp``, the common refinement, then the size-1 axes."""
    refined = _refine(layout)
    if refined is None:
        refined = _pair_primes(layout)
    ones = [_Atom((axis,), 1) for axis in (*ATTENTION, *EXPERT) if getattr(layout, axis) == 1]
    return [_Atom(("pp",), layout.pp), *refined, *ones]


def _refine(layout: Layout) -> list[_Atom] | None:
    """The common refinement of the two factorisations in rank order, or None if there is none.

    Both factorisations cut the same range of ranks at their cumulative products. The cuts of the
    two together are a factorisation again exactly when each divides the next.
    """
    cuts = {1}
    for axes in (ATTENTION, EXPERT):
        cuts |= set(
            itertools.accumulate((getattr(layout, a) for a in reversed(axes)), operator.mul)
        )
    sizes = sorted(cuts)
    if any(larger % smaller for smaller, larger in itertools.pairwise(sizes)):
        return None
    atoms = [
        _Atom((_owner(layout, ATTENTION, low), _owner(layout, EXPERT, low)), high // low)
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
    raise AssertionError(f"stride {stride} lies outside {size} ranks")


def _pair_primes(layout: Layout) -> list[_Atom]:
    """Atoms made by pairing the prime factors of both sides, fastest axes first."""
    sizes: dict[tuple[str, str], int] = {}
    for prime in sorted(_prime_factors(layout.num_devices // layout.pp)):
        sides = [
            [
                axis
                for axis in reversed(axes)
                for _ in range(_multiplicity(prime, getattr(layout, axis)))
            ]
            for axes in (ATTENTION, EXPERT)
        ]
        for owners in zip(*sides, strict=True):
            sizes[owners] = sizes.get(owners, 1) * prime
    order = [pair for pair in itertools.product(ATTENTION, EXPERT) if pair in sizes]
    return [_Atom(pair, sizes[pair]) for pair in order]


def _prime_factors(number: int) -> set[int]:
    return {p for p in _divisors(number) if p > 1 and len(_divisors(p)) == 2}


def _multiplicity(prime: int, number: int) -> int:
    count = 0
    while number % prime == 0:
        number, count = number // prime, count + 1
    return count


def _factor(size: int, wanted: int) -> float:
    return max(size, wanted) / min(size, wanted)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
