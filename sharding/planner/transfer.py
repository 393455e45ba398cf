"""One collective: what each device gives to it, and what that makes it send."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sharding.folding import Layout

Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "permute"]


@dataclass(frozen=True)
class Transfer:
    """A collective over logical axes, as often as it happens.

    Attributes:
      what: in words.
      kind: of collective.
      axes: logical axes of the layout that its groups span.
      elements: of the array that each device gives to it.
      itemsize: bytes of an element.
      times: how often.
      gradient: bytes of an element of what its transpose sends in the backward pass; 0 is no
        gradient.
      repeated: under "selective" rematerialisation the backward pass begins with it again.
    """

    what: str
    kind: Kind
    axes: tuple[str, ...]
    elements: int
    itemsize: int
    times: int = 1
    gradient: int = 0
    repeated: bool = False

    @property
    def bytes(self) -> int:
        """Of all that a device gives."""
        return self.elements * self.itemsize * self.times

    def group(self, layout: Layout) -> int:
        """Devices that take part."""
        return math.prod(getattr(layout, axis) for axis in self.axes)

    def sent(self, layout: Layout) -> float:
        """Bytes that a device sends, with rings: what it gives times n - 1 (all-gather), (n - 1) /
        n (reduce-scatter, all-to-all), twice that (all-reduce), or as it is (permute)."""
        n = self.group(layout)
        share = {
            "all_gather": n - 1.0,
            "reduce_scatter": (n - 1) / n,
            "all_to_all": (n - 1) / n,
            "all_reduce": 2 * (n - 1) / n,
            "permute": float(n > 1),
        }
        return self.bytes * share[self.kind]

    def transposed(self, layout: Layout) -> "Transfer":
        """What its gradient sends: an all-gather for a reduce-scatter and the reverse, any other
        for itself."""
        kind, elements = self.kind, self.elements
        if kind == "all_gather":
            kind, elements = "reduce_scatter", elements * self.group(layout)
        elif kind == "reduce_scatter":
            kind, elements = "all_gather", elements // self.group(layout)
        return replace(
            self,
            what=f"gradient of {self.what}",
            kind=kind,
            elements=elements,
            itemsize=self.gradient,
        )


def present(transfers: Iterable[Transfer], layout: Layout) -> list[Transfer]:
    """Those that cross devices: groups of one send nothing."""
    return [t for t in transfers if t.group(layout) > 1 and t.bytes]


def repeated(transfers: Iterable[Transfer], times: int) -> list[Transfer]:
    """Each of them so many times as often."""
    return [replace(t, times=t.times * times) for t in transfers]
