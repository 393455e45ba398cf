"""Picture of a folding: every device with its coordinates in attention and among the experts."""

from pathlib import Path
from typing import Any

from sharding.folding import FoldedMesh, Layout, fold_abstract
from sharding.folding.groups import axis_ranks

LOGICAL_AXES = {"attention": ("pp", "dp", "cp", "tp"), "experts": ("pp", "edp", "ep", "etp")}


def draw(layout: Layout, path: Path, columns: int = 8) -> None:
    """Draws the devices of `layout` twice, coloured by what they hold in common.

    Above, a colour is the sequences of a data-parallel rank in a stage, and the text is the
    device's rank along each axis; below, a colour is the experts of an expert-parallel rank in a
    stage.
    Devices are in the order of their ranks, a row of `columns` at a time.

    Args:
      path: file of the picture; the suffix decides its format.
    """
    from matplotlib.figure import Figure

    mesh = fold_abstract(layout)
    columns = min(columns, layout.num_devices)
    lines = -(-layout.num_devices // columns)
    figure = Figure(figsize=(1.1 * columns, 1.2 + 2.2 * lines), layout="constrained")
    figure.suptitle(f"{layout}: the same {layout.num_devices} devices, twice")
    for axes, side in zip(figure.subplots(2, 1), LOGICAL_AXES, strict=True):
        _draw_side(axes, mesh, side, columns)
    figure.savefig(path, dpi=120)


def _draw_side(axes: Any, mesh: FoldedMesh, side: str, columns: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    names = [name for name in LOGICAL_AXES[side] if getattr(mesh.layout, name) > 1] or [
        LOGICAL_AXES[side][-1]
    ]
    coordinates = {name: axis_ranks(mesh, name) for name in LOGICAL_AXES[side]}
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
