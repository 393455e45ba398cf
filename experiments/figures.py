"""Pictures and tables of studies: curves with their spread over seeds, and final accuracies."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.study import Curve
from jrl.report.plots import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE

DPI = 160
COMPARED = (BLUE, ORANGE, GREEN, PURPLE, "#c81e4a", "#0e8fa8", "#8a6d1b", "#52606d")
AXES = {
    "step": "training steps",
    "sampled_tokens": "sampled tokens, thousands",
    "decode_steps": "decoding steps, thousands",
    "seconds": "minutes of training",
}
UNITS = {"step": 1.0, "sampled_tokens": 1e3, "decode_steps": 1e3, "seconds": 60.0}
"""What an axis counts in."""


def by_variant(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """The runs of each variant, one per seed."""
    grouped: dict[str, list[Curve]] = {}
    for curve in curves:
        grouped.setdefault(curve.variant, []).append(curve)
    return grouped


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and range over seeds; a dash for what a variant does not log or no seed has."""
    if not values or np.isnan(values).any():
        return "-"
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{np.mean(values):.{digits}f} ({low} to {high})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a README."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def minutes(curves: Sequence[Curve]) -> str:
    """Of training, a run."""
    return f"{np.mean([curve.numbers['seconds'][-1] for curve in curves]) / 60:.1f}"


def final_table(curves: Sequence[Curve], metrics: Mapping[str, str] | None = None) -> str:
    """Accuracy before and after, and means of other metrics over the steps of the second half.

    Args:
      metrics: headings by the names of metrics in ``results.csv``.
    """
    metrics, rows = metrics or {}, []
    for variant, runs in by_variant(curves).items():
        others = [spread([_second_half(run, name) for run in runs]) for name in metrics]
        start, end = [run.accuracy[0] for run in runs], [run.final for run in runs]
        rows.append([variant, f"{np.mean(start):.3f}", spread(end), *others, minutes(runs)])
    return markdown(["variant", "before", "after", *metrics.values(), "minutes a run"], rows)


def _second_half(run: Curve, metric: str) -> float:
    values = run.numbers[metric]
    return float(np.mean(values[max(1, len(values) // 2) :]))


def draw_curves(curves: Sequence[Curve], to: Path, over: Sequence[str], title: str) -> None:
    """Held-out accuracy over one or more quantities: a line is the mean over seeds, the band their
    range."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(over), figsize=(5.2 * len(over), 3.9), squeeze=False)
    for axis, quantity in zip(axes[0], over, strict=True):
        for colour, (variant, runs) in zip(_colours(), by_variant(curves).items(), strict=False):
            grid = np.linspace(0, min(run.numbers[quantity][-1] for run in runs), 60)
            lines = [[run.at(quantity, spent) for spent in grid] for run in runs]
            x = grid / UNITS[quantity]
            axis.plot(x, np.mean(lines, axis=0), color=colour, label=variant, lw=1.8)
            axis.fill_between(
                x, np.min(lines, axis=0), np.max(lines, axis=0), color=colour, alpha=0.1
            )
        axis.set_xlabel(AXES[quantity], color=INK)
        plain(axis)
    axes[0][0].set_ylabel("held-out accuracy", color=INK)
    axes[0][0].legend(frameon=False, fontsize=8)
    save(figure, to, title)


def draw_finals(curves: Sequence[Curve], to: Path, title: str) -> None:
    """Held-out accuracy at the end by variant: a bar is the mean over seeds, a dot a seed."""
    import matplotlib.pyplot as plt

    grouped = by_variant(curves)
    figure, axis = plt.subplots(figsize=(7.0, 0.42 * len(grouped) + 1.4))
    for place, runs in enumerate(grouped.values()):
        finals = [run.final for run in runs]
        axis.barh(place, np.mean(finals), height=0.62, color=COMPARED[0], alpha=0.75)
        axis.plot(finals, [place] * len(finals), "o", color=INK, ms=4)
    start = float(np.mean([run.accuracy[0] for run in curves]))
    axis.axvline(start, color=MUTED, lw=1, ls="--")
    axis.set_yticks(range(len(grouped)), list(grouped))
    axis.invert_yaxis()
    axis.set_xlabel("held-out accuracy at the end (dashed: before)", color=INK)
    plain(axis)
    save(figure, to, title)


def _colours():
    while True:
        yield from COMPARED


def plain(axis) -> None:
    axis.grid(color=GRID, lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure, to: Path, title: str) -> None:
    import matplotlib.pyplot as plt

    figure.suptitle(title, color=INK, fontsize=11)
    figure.tight_layout()
    figure.savefig(to, dpi=DPI)
    plt.close(figure)
