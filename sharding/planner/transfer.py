"""Transfer: a collective with its input size per device, and the bytes that a device sends."""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sharding.compression import GROUP_TOKENS
from sharding.folding import Layout
from sharding.folding.atoms import atoms_of

Side = Literal["inside", "across"]
"""Side of a sequence-parallel group, ``cp x tp``: among its ranks, or among such groups."""
Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "permute"]
FP8_BYTES, SCALE_BYTES = 1, 4


@dataclass(frozen=True)
class Transfer:
    """A collective over logical axes, with the number of its calls.

    Attributes:
      what: in words.
      kind: of collective.
      axes: logical axes of the layout that its groups span.
      side: its groups span only that part of the axes; None is all of it.
      elements: of the input array of each device.
      itemsize: bytes of an element.
      times: number of calls.
      gradient: bytes of an element that its transpose sends in the backward pass; 0 is no gradient.
      repeated: the backward pass repeats it under rematerialisation (`Method.repeats`).
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
        """Bytes of a device's input, over all calls."""
        return self.elements * self.itemsize * self.times

    def group(self, layout: Layout) -> int:
        """Devices of a group."""
        if self.side is None:
            return math.prod(getattr(layout, axis) for axis in self.axes)
        return math.prod(size for _, size in group_strides(self.axes, self.side, layout))

    def sent(self, layout: Layout) -> float:
        """Bytes that a device sends, with ring algorithms.

        They are its input times n - 1 (all-gather), (n - 1) / n (reduce-scatter, all-to-all), twice
        that (all-reduce), or 1 (permute).
        """
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
        """Transpose, the collective of its gradient.

        It is an all-gather for a reduce-scatter and the reverse; any other is its own transpose.
        """
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
def group_strides(
    axes: tuple[str, ...], side: Side | None, layout: Layout
) -> list[tuple[int, int]]:
    """Strides and sizes of groups over logical axes, as (ranks between neighbours, number of them).

    The smallest stride comes first.
    """
    groups: list[tuple[int, int]] = []
    stride = 1
    for atom in reversed(_atoms_of(layout)):
        is_inside = "cp" in atom.owners or "tp" in atom.owners
        on_side = side is None or is_inside == (side == "inside")
        if atom.size > 1 and on_side and set(axes) & set(atom.owners):
            step, size = groups[-1] if groups else (stride, 1)
            if step * size == stride:
                groups[-1:] = [(step, size * atom.size)]
            else:
                groups.append((stride, atom.size))
        stride *= atom.size
    return groups


def hierarchical_gather(
    what: str,
    axes: tuple[str, ...],
    layout: Layout,
    shard_elements: int,
    itemsize: int,
    gradient: int = 0,
) -> list[Transfer]:
    """Hierarchical all-gather of shards of `shard_elements` elements (`sharding.zero`).

    It has two stages, across sequence-parallel groups and then inside; a stage of one device is
    left out. The reverse is a reduce-scatter.
    """
    across = Transfer(
        what, "all_gather", axes, shard_elements, itemsize, gradient=gradient, side="across"
    )
    gathered = shard_elements * across.group(layout)
    inside = replace(across, elements=gathered, side="inside")
    return drop_empty([across, inside], layout)


def drop_empty(transfers: Iterable[Transfer], layout: Layout) -> list[Transfer]:
    """The transfers that send anything: groups of one device send nothing."""
    return [t for t in transfers if t.group(layout) > 1 and t.bytes]


def repeat_transfers(transfers: Iterable[Transfer], times: int) -> list[Transfer]:
    """The transfers with `times` times as many calls."""
    return [replace(t, times=t.times * times) for t in transfers]


def to_fp8(
    transfer: Transfer, layout: Layout, d_model: int, is_ragged: bool = False
) -> tuple[list[Transfer], list[Transfer]]:
    """FP8 form of a collective of tokens (`sharding.compression`), forward and backward.

    It sends a byte an element, and float32 scales of tokens or of groups of tokens and channels. A
    reduction is an all-to-all of terms.

    Args:
      transfer: the collective without FP8.
      d_model: elements of a token.
      is_ragged: it has slices, each of which may end in a group that is not full.
    """
    n, tokens = transfer.group(layout), transfer.elements // d_model
    forward_kind, backward_kind = "all_to_all", "all_to_all"
    if transfer.kind == "all_gather":
        forward_kind, tokens_back, blocks = "all_gather", n * tokens, n
    elif transfer.kind == "reduce_scatter":
        backward_kind, tokens_back, blocks = "all_gather", tokens // n, 1
    else:
        tokens_back, blocks = tokens, n
    groups = blocks * math.ceil(tokens_back / blocks / GROUP_TOKENS)
    if is_ragged:
        groups = tokens_back // GROUP_TOKENS + n
    content = replace(transfer, kind=forward_kind, itemsize=FP8_BYTES, gradient=0)
    forward = [
        content,
        replace(content, what=f"scales of {transfer.what}", elements=tokens, itemsize=SCALE_BYTES),
    ]
    gradient = replace(
        content,
        what=f"gradient of {transfer.what}",
        kind=backward_kind,
        elements=tokens_back * d_model,
        repeated=False,
    )
    scales = replace(
        gradient, what=f"scales of {gradient.what}", elements=groups * d_model, itemsize=SCALE_BYTES
    )
    return forward, [gradient, scales]
