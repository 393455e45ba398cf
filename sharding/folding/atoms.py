"""Atomic mesh axes, of which the axes of attention and of experts consist."""

import itertools
import operator
from dataclasses import dataclass

from sharding.folding.layout import ATTENTION, EXPERT, Layout, prime_factors


@dataclass(frozen=True)
class Atom:
    """An atomic mesh axis: its size, and the logical axes it belongs to."""

    owners: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        return "_".join(self.owners)


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
