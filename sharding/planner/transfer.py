"""One collective: what each device gives to it, and what that makes it send."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sharding.activation_wire import GROUP
from sharding.folding import Layout
from sharding.folding.atoms import atoms_of

Side = Literal["inside", "across"]
"""Of a sequence-parallel group, ``cp x tp``: among its ranks, or among such groups."""
Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "permute"]
BYTE, SCALE = 1, 4


@dataclass(frozen=True)
class Transfer:
    """A collective over logical axes, as often as it happens.

    Attributes:
      what: in words.
      kind: of collective.
      axes: logical axes of the layout that its groups span.
      side: its groups span that part of the axes alone; None is all of it.
      elements: of the array that each device gives to it.
      itemsize: bytes of an element.
      times: how often.
      gradient: bytes of an element of what its transpose sends in the backward pass; 0 is no
        gradient.
      repeated: the backward pass begins with it again where it repeats (`Method.repeats`).
    """

    what: str
    kind: Kind
    axes: tuple[str, ...]
    elements: int
    itemsize: int
    times: int = 1
    gradient: int = 0
    repeated: bool = False
    side: Side | None = None

    @property
    def bytes(self) -> int:
        """Of all that a device gives."""
        return self.elements * self.itemsize * self.times

    def group(self, layout: Layout) -> int:
        """Devices that take part."""
        if self.side is None:
            return math.prod(getattr(layout, axis) for axis in self.axes)
        return math.prod(size for _, size in spanned(self.axes, self.side, layout))

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
        return Transfer(
            f"gradient of {self.what}",
            kind,
            self.axes,
            elements,
            itemsize=self.gradient,
            times=self.times,
            gradient=self.gradient,
            repeated=self.repeated,
            side=self.side,
        )


_atoms_of = functools.lru_cache(maxsize=64)(atoms_of)


@functools.lru_cache(maxsize=8192)
def spanned(axes: tuple[str, ...], side: Side | None, layout: Layout) -> list[tuple[int, int]]:
    """What groups over logical axes span, as (ranks between neighbours, how many of them follow
    each other so), neighbours that are nearest first."""
    found: list[tuple[int, int]] = []
    stride = 1
    for atom in reversed(_atoms_of(layout)):
        is_inside = "cp" in atom.owners or "tp" in atom.owners
        on_side = side is None or is_inside == (side == "inside")
        if atom.size > 1 and on_side and set(axes) & set(atom.owners):
            step, size = found[-1] if found else (stride, 1)
            if step * size == stride:
                found[-1:] = [(step, size * atom.size)]
            else:
                found.append((stride, atom.size))
        stride *= atom.size
    return found


def staged(
    what: str, axes: tuple[str, ...], layout: Layout, part: int, itemsize: int, gradient: int = 0
) -> list[Transfer]:
    """Shards of `part` elements joined in two stages, across sequence-parallel groups and then
    inside (`sharding.zero`); a stage of one device is none. The reverse sums into shards."""
    across = Transfer(what, "all_gather", axes, part, itemsize, gradient=gradient, side="across")
    joined = part * across.group(layout)
    inside = replace(across, elements=joined, side="inside")
    return present([across, inside], layout)


def present(transfers: Iterable[Transfer], layout: Layout) -> list[Transfer]:
    """Those that cross devices: groups of one send nothing."""
    return [t for t in transfers if t.group(layout) > 1 and t.bytes]


def repeated(transfers: Iterable[Transfer], times: int) -> list[Transfer]:
    """Each of them so many times as often."""
    return [replace(t, times=t.times * times) for t in transfers]


def in_fp8(
    transfer: Transfer, layout: Layout, d_model: int, is_ragged: bool = False
) -> tuple[list[Transfer], list[Transfer]]:
    """What `sharding.activation_wire` sends in place of a collective of tokens, forward and
    backward: a byte an element, and float32 scales of tokens or of groups of tokens and channels.
    What sums is an all-to-all of terms.

    Args:
      transfer: as it would be sent without.
      d_model: elements of a token.
      is_ragged: it has slices, of which each may end in a group that is not full.
    """
    n, tokens = transfer.group(layout), transfer.elements // d_model
    there, back = "all_to_all", "all_to_all"
    if transfer.kind == "all_gather":
        there, tokens_back, blocks = "all_gather", n * tokens, n
    elif transfer.kind == "reduce_scatter":
        back, tokens_back, blocks = "all_gather", tokens // n, 1
    else:
        tokens_back, blocks = tokens, n
    groups = blocks * math.ceil(tokens_back / blocks / GROUP)
    if is_ragged:
        groups = tokens_back // GROUP + n
    content = replace(transfer, kind=there, itemsize=BYTE, gradient=0)
    forward = [
        content,
        replace(content, what=f"scales of {transfer.what}", elements=tokens, itemsize=SCALE),
    ]
    gradient = replace(
        content,
        what=f"gradient of {transfer.what}",
        kind=back,
        elements=tokens_back * d_model,
        repeated=False,
    )
    scales = replace(
        gradient, what=f"scales of {gradient.what}", elements=groups * d_model, itemsize=SCALE
    )
    return forward, [gradient, scales]
