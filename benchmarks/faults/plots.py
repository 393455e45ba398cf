"""Plots of the results of `benchmarks.faults.benchmark`."""

from pathlib import Path
from typing import Any

import numpy as np

from jrl.faults.replay import RED, style_axes
from jrl.report.plots import BLUE, MUTED


def plot_benchmark(results: dict[str, Any], path: Path | str) -> None:
    """Draws precision, recall and F1 of each detector with intervals, and the paper's figures."""
    from matplotlib.figure import Figure

    detectors = results["detectors"]
    figure = Figure(figsize=(9, 0.5 * len(detectors) + 1.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    rows = np.arange(len(detectors))[::-1]
    for i, (axes, name) in enumerate(zip(panels, ("precision", "recall", "f1"), strict=True)):
        for row, result in zip(rows, detectors.values(), strict=True):
            value, low, high = result[name]
            axes.plot([low, high], [row, row], color=BLUE, linewidth=2, alpha=0.4)
            axes.plot(value, row, "o", color=BLUE, markersize=6)
            if result["paper"]:
                axes.plot(result["paper"][i], row, "D", color=RED, markersize=5, fillstyle="none")
        style_axes(axes, "F1" if name == "f1" else name)
    panels[0].set_yticks(rows, list(detectors))
    panels[2].plot([], [], "o", color=BLUE, label="here, with 95 % interval")
    panels[2].plot([], [], "D", color=RED, fillstyle="none", label="paper, 150 real faults")
    figure.legend(fontsize=7, frameon=False, loc="outside lower right", ncols=2)
    figure.savefig(path, dpi=150)


def plot_scale(rows: list[dict[str, float]], path: Path | str) -> None:
    """Draws seconds per call over the number of machines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.2), layout="constrained")
    axes = figure.subplots()
    machines = [row["machines"] for row in rows]
    for key, label, colour in (("clean", "clean", BLUE), ("fault", "with a fault", RED)):
        wall, cpu = ([row[f"{key}_{kind}"] for row in rows] for kind in ("seconds", "cpu_seconds"))
        axes.plot(machines, wall, "o-", color=colour, label=label)
        axes.plot(machines, cpu, ":", color=colour, label=f"{label}, CPU time")
    axes.axhline(3.6, color=MUTED, linestyle="--", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="machines")
    axes.legend(fontsize=7, frameon=False)
    style_axes(axes, "One call on 15 minutes of 7 metrics; dashed: the paper's 3.6 s", "seconds")
    figure.savefig(path, dpi=150)
