"""Process groups: the ranks that each collective of a folded mesh joins."""

from collections.abc import Sequence

import numpy as np

from sharding.folding import FoldedMesh, Layout, fold_abstract

LOGICAL = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
"""The logical axes, attention's first, fastest first on each side."""


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
    index = [0] * mesh.size(mesh.axes)
    for group in axis_groups(mesh, getattr(mesh, axis)):
        for position, rank in enumerate(group):
            index[rank] = position
    return index


def describe(layout: Layout) -> str:
    """The groups of every logical axis of `layout`, a line each, without any device.

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
    lines = [f"{name:7}  {_format_groups(mesh, axes)}" for name, axes in {**rows, **named}.items()]
    return "\n".join([f"{layout}, {layout.num_devices} devices", *lines])


def _format_groups(mesh: FoldedMesh, axes: Sequence[str]) -> str:
    if mesh.size(axes) == 1:
        return "every rank by itself"
    return " ".join(f"[{','.join(map(str, group))}]" for group in axis_groups(mesh, axes))
