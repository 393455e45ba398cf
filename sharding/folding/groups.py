"""Process groups of a folded mesh, the ranks that a collective joins: as text, as a picture, and by
the servers that their devices are in."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sharding.collectives import IndexGroups
from sharding.folding import FoldedMesh, Layout, fold_abstract

LOGICAL = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
"""The logical axes, attention's first, fastest first on each side."""
AXES_OF_SIDE = {"attention": ("pp", "dp", "cp", "tp"), "experts": ("pp", "edp", "ep", "etp")}


def axis_groups(mesh: FoldedMesh, axes: Sequence[str]) -> list[list[int]]:
    """The ranks that a collective over `axes` joins, each group in the order of its axis index.

    Rank ``r`` is the ``r``-th of the devices that the layout was folded over.

    Args:
      axes: atoms of `mesh`, for example ``mesh.ep``, or ``(*mesh.dp, *mesh.cp)``.
    """
    names = mesh.axes
    ranks = np.arange(mesh.size(names)).reshape([mesh.size((name,)) for name in names])
    others = [names.index(name) for name in names if name not in axes]
    ranks = ranks.transpose(others + [names.index(name) for name in axes])
    return sorted(ranks.reshape(-1, mesh.size(axes)).tolist())


def axis_ranks(mesh: FoldedMesh, axis: str) -> list[int]:
    """The index of each rank along a logical axis."""
    groups = axis_groups(mesh, getattr(mesh, axis))
    index = {rank: position for group in groups for position, rank in enumerate(group)}
    return [index[rank] for rank in range(len(index))]


def describe(layout: Layout) -> str:
    """The groups of every logical axis of `layout`, a line each; needs no device.

    Examples:
      >>> print(describe(Layout.parse("tp2 dp2 / ep4")))
      tp2 cp1 dp2 pp1 / ep4 etp1 edp1, 4 devices
      TP       [0,1] [2,3]
      CP       every rank by itself
      DP       [0,2] [1,3]
      DP x CP  [0,2] [1,3]
      PP       every rank by itself
      ETP      every rank by itself
      EP       [0,1,2,3]
      EDP      every rank by itself
    """
    mesh = fold_abstract(layout)
    named = {axis.upper(): getattr(mesh, axis) for axis in LOGICAL}
    # Dense gradients are summed over these two together.
    rows = {**dict(list(named.items())[:3]), "DP x CP": (*mesh.dp, *mesh.cp)}
    lines = [f"{layout}, {layout.num_devices} devices"]
    for name, axes in {**rows, **named}.items():
        groups = [f"[{','.join(map(str, group))}]" for group in axis_groups(mesh, axes)]
        text = "every rank by itself" if mesh.size(axes) == 1 else " ".join(groups)
        lines.append(f"{name:7}  {text}")
    return "\n".join(lines)


def draw(layout: Layout, path: Path) -> None:
    """Draws the devices of `layout` twice, coloured by what they hold in common.

    Above, a colour is the sequences of a data-parallel rank in a stage, below the experts of an
    expert-parallel rank in a stage; the text is the device's rank along each axis. Devices are in
    the order of their ranks, a row of eight at a time.

    Args:
      path: file of the picture; the suffix decides its format.
    """
    from matplotlib.figure import Figure

    mesh = fold_abstract(layout)
    columns = min(8, layout.num_devices)
    lines = -(-layout.num_devices // columns)
    figure = Figure(figsize=(1.1 * columns, 1.2 + 2.2 * lines), layout="constrained")
    figure.suptitle(f"{layout}: the same {layout.num_devices} devices, twice")
    for axes, side in zip(figure.subplots(2, 1), AXES_OF_SIDE, strict=True):
        _draw_side(axes, mesh, side, columns)
    figure.savefig(path, dpi=120)


def _draw_side(axes: Any, mesh: FoldedMesh, side: str, columns: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    every = AXES_OF_SIDE[side]
    names = [name for name in every if getattr(mesh.layout, name) > 1] or [every[-1]]
    coordinates = {name: axis_ranks(mesh, name) for name in every}
    shared = ("pp", "dp") if side == "attention" else ("pp", "ep")
    owners = list(zip(*(coordinates[name] for name in shared), strict=True))
    colour_indices = {owner: index for index, owner in enumerate(sorted(set(owners)))}
    palette = colormaps["tab20"]
    for rank, owner in enumerate(owners):
        row, column = divmod(rank, columns)
        axes.add_patch(
            FancyBboxPatch(
                (column + 0.08, row + 0.08),
                0.84,
                0.84,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=(*palette(colour_indices[owner] % 20)[:3], 0.55),
                edgecolor="0.3",
            )
        )
        axes.text(column + 0.5, row + 0.27, f"device {rank}", ha="center", va="center", size=8)
        text = "\n".join(
            " ".join(f"{name}{coordinates[name][rank]}" for name in names[start : start + 2])
            for start in range(0, len(names), 2)
        )
        axes.text(column + 0.5, row + 0.63, text, ha="center", va="center", size=9, weight="bold")
    same = "same colour: same sequences" if side == "attention" else "same colour: same experts"
    axes.set_title(f"{side} ({same})", size=10)
    axes.set_xlim(0, columns)
    axes.set_ylim(-(-mesh.layout.num_devices // columns), 0)
    axes.set_aspect("equal")
    axes.axis("off")


class ServerGroups(NamedTuple):
    """Split of the devices along mesh axes by their servers.

    Attributes:
      servers: servers that each group along the axes spans.
      devices: members of a group in one server, neighbours along the axes.
    """

    servers: int
    devices: int

    @property
    def inside(self) -> IndexGroups:
        """Indices along the axes of the devices of each server."""
        starts = range(0, self.servers * self.devices, self.devices)
        return tuple(tuple(range(start, start + self.devices)) for start in starts)

    @property
    def across(self) -> IndexGroups:
        """Indices along the axes of one device per server, of equal rank in their servers."""
        return tuple(zip(*self.inside, strict=True))


def server_groups(mesh: FoldedMesh, axes: Sequence[str], server_devices: int) -> ServerGroups:
    """Split of the groups along `axes` by servers, each of `server_devices` consecutive ranks.

    Raises:
      ValueError: where groups have unequal parts in their servers.
    """
    splits = {_parts(group, server_devices) for group in axis_groups(mesh, axes)}
    parts = max(splits, key=len)
    if len(splits) > 1 or len(set(parts)) > 1:
        raise ValueError(
            f"servers of {server_devices} devices cut groups of {sum(parts)} of layout "
            f"{mesh.layout} into unequal parts, such as {', '.join(map(str, parts))}: choose "
            "sizes that divide each other."
        )
    return ServerGroups(len(parts), parts[0])


def _parts(ranks: Sequence[int], server_devices: int) -> tuple[int, ...]:
    """Number of consecutive ranks in each server."""
    runs = itertools.groupby(rank // server_devices for rank in ranks)
    return tuple(len(list(run)) for _, run in runs)
