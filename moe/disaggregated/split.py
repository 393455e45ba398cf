"""Split of devices into two disjoint groups: for attention and for the routed experts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sharding.folding import FoldedMesh, Layout, fold

EXAMPLE = "tp2 dp4 / ep8"


@dataclass(frozen=True)
class Split:
    """Number of devices of each side, and the parallel layout of each.

    Args:
      attention: axes ``tp`` and ``dp``: heads and hidden units of dense layers over ``tp``, rows
        over ``dp``. Norms, router, shared expert, embedding and head are on this side.
      experts: axes ``ep`` and ``etp``: experts over ``ep``, the hidden units of each over ``etp``.

    Raises:
      ValueError: on axes that a side does not have.

    References:
      Zhu et al., "MegaScale-Infer", 2025, section 3. https://arxiv.org/abs/2504.02263
    """

    attention: str
    experts: str

    def __post_init__(self):
        _sizes(self.attention, ("tp", "dp"), "attention")
        _sizes(self.experts, ("ep", "etp"), "experts")

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Parses ``"tp2 dp4 / ep8"``: attention before the slash, experts after it, on disjoint
        devices.

        Raises:
          ValueError: on a text that is not two sides, or on axes that a side does not have.
        """
        attention, stroke, experts = text.partition("/")
        if not stroke or "/" in experts:
            raise ValueError(
                f"split {text!r} does not name two device groups: write attention, a slash and "
                f"experts, for example {EXAMPLE!r}."
            )
        return cls(attention.strip(), experts.strip())

    @property
    def attention_layout(self) -> Layout:
        return Layout(**_sizes(self.attention, ("tp", "dp"), "attention"))

    @property
    def experts_layout(self) -> Layout:
        sizes = _sizes(self.experts, ("ep", "etp"), "experts")
        return Layout(dp=sizes.get("ep", 1) * sizes.get("etp", 1), **sizes)

    @property
    def num_devices(self) -> int:
        """Number of devices of both sides."""
        return self.attention_layout.num_devices + self.experts_layout.num_devices

    def __str__(self) -> str:
        return f"{self.attention} / {self.experts}"


@dataclass(frozen=True)
class SplitMesh:
    """Two folded meshes that share no device."""

    attention: FoldedMesh
    experts: FoldedMesh


def fold_split(split: Split, devices: Sequence[Any] | None = None) -> SplitMesh:
    """Folds the meshes of a split, attention on the first of `devices` (all of them by default).

    Raises:
      ValueError: if the number of devices differs from the split's.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != split.num_devices:
        raise ValueError(
            f"split {str(split)!r} needs {split.num_devices} devices but {len(devices)} were "
            "given: change a size, or pass that many devices."
        )
    first = split.attention_layout.num_devices
    return SplitMesh(
        fold(split.attention_layout, devices[:first]), fold(split.experts_layout, devices[first:])
    )


def devices_of(mesh: FoldedMesh) -> list[Any]:
    """Devices of a mesh in the order of their ranks."""
    assert isinstance(mesh.mesh, jax.sharding.Mesh)
    return list(mesh.mesh.devices.flat)


def has_local_devices(mesh: FoldedMesh) -> bool:
    """True if a device of `mesh` belongs to this process, which then runs its programs."""
    return any(device.process_index == jax.process_index() for device in devices_of(mesh))


def _sizes(text: str, axes: tuple[str, ...], side: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in text.split():
        match = re.fullmatch(r"([a-z]+)([1-9]\d*)", word)
        if match is None or match[1] not in axes or match[1] in sizes:
            raise ValueError(
                f"{side}={text!r}: {word!r} is not one of the axes {' and '.join(axes)} with a "
                f"size, each once: write for example {EXAMPLE!r}."
            )
        sizes[match[1]] = int(match[2])
    if not sizes:
        raise ValueError(f"{side}={text!r} names no axis: write for example {EXAMPLE!r}.")
    return sizes
