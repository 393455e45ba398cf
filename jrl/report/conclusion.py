"""Summary of a run in a few lines, with the paths of its pages and the next command."""

import shlex
from collections.abc import Mapping, Sequence

from jrl.runs.folder import RunFolder
from jrl.runs.records import read_metrics

Line = Mapping[str, float | int]


def conclusion(folder: RunFolder) -> str:
    """The held-out metrics of the first evaluation and of the last, and the paths of the pages."""
    lines = read_metrics(folder.metrics_path)
    said = _of_supervised(lines, folder) or _of_rewards(lines, folder)
    return "\n".join(
        [
            said[0],
            f"plots: {folder.plots_path / 'overview.png'}",
            f"page:  {folder.report_path}",
            said[1],
        ]
    )


def _of_rewards(lines: Sequence[Line], folder: RunFolder) -> tuple[str, str]:
    evaluations = [line for line in lines if "val/accuracy/sampled" in line]
    first, last = evaluations[0], evaluations[-1]
    parts = [
        f"{way} {first[f'val/accuracy/{way}']:.3f} -> {last[f'val/accuracy/{way}']:.3f}"
        for way in ("sampled", "greedy")
    ]
    start = "warm start" if "warm_start/steps" in first else "start"
    return (
        f"held-out accuracy, {start} -> step {last['step']}: {', '.join(parts)}",
        f"more:  python -m jrl.evaluate {_path(folder)} --k 8",
    )


def _of_supervised(lines: Sequence[Line], folder: RunFolder) -> tuple[str, str] | None:
    """None of a run that learned from rewards."""
    evaluations = [line for line in lines if "val/nll" in line]
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    model = str(folder.config()["run"]["model"])
    parts = [
        f"loss {first['val/nll']:.3f} -> {last['val/nll']:.3f} nats a token",
        f"perplexity {first['val/perplexity']:.4g} -> {last['val/perplexity']:.4g}",
        f"tokens right {first['val/token_accuracy']:.1%} -> {last['val/token_accuracy']:.1%}",
    ]
    return (
        f"held-out conversations, start -> step {last['step']}: {', '.join(parts)}",
        f"next:  python -m jrl.train grpo --model {shlex.quote(model)} --weights {_path(folder)} "
        "--task ...",
    )


def _path(folder: RunFolder) -> str:
    return shlex.quote(str(folder.path))
