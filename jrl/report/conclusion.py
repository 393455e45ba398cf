"""Summary of a run in a few lines, with the paths of its pages and the next command."""

import shlex
from collections.abc import Mapping, Sequence

from jrl.runs.folder import RunFolder
from jrl.runs.records import read_metrics

StepMetrics = Mapping[str, float | int]


def summarize_run(folder: RunFolder) -> str:
    """The held-out metrics of the first evaluation and of the last, and the paths of the pages."""
    lines = read_metrics(folder.metrics_path)
    summary = _summarize_supervised(lines, folder) or _summarize_rewards(lines, folder)
    return "\n".join(
        [
            summary[0],
            f"plots: {folder.plots_path / 'overview.png'}",
            f"page:  {folder.report_path}",
            summary[1],
        ]
    )


def _summarize_rewards(lines: Sequence[StepMetrics], folder: RunFolder) -> tuple[str, str]:
    evaluations = [line for line in lines if "val/accuracy/sampled" in line]
    first, last = evaluations[0], evaluations[-1]
    changes = [
        f"{mode} {first[f'val/accuracy/{mode}']:.3f} -> {last[f'val/accuracy/{mode}']:.3f}"
        for mode in ("sampled", "greedy")
    ]
    start = "warm start" if "warm_start/steps" in first else "start"
    return (
        f"held-out accuracy, {start} -> step {last['step']}: {', '.join(changes)}",
        f"more:  python -m jrl.evaluate {_path(folder)} --k 8",
    )


def _summarize_supervised(
    lines: Sequence[StepMetrics], folder: RunFolder
) -> tuple[str, str] | None:
    """None of a run that learned from rewards."""
    evaluations = [line for line in lines if "val/nll" in line]
    if not evaluations:
        return None
    first, last = evaluations[0], evaluations[-1]
    model = str(folder.config()["run"]["model"])
    changes = [
        f"loss {first['val/nll']:.3f} -> {last['val/nll']:.3f} nats a token",
        f"perplexity {first['val/perplexity']:.4g} -> {last['val/perplexity']:.4g}",
        f"tokens right {first['val/token_accuracy']:.1%} -> {last['val/token_accuracy']:.1%}",
    ]
    return (
        f"held-out conversations, start -> step {last['step']}: {', '.join(changes)}",
        f"next:  python -m jrl.train grpo --model {shlex.quote(model)} --weights {_path(folder)} "
        "--task ...",
    )


def _path(folder: RunFolder) -> str:
    return shlex.quote(str(folder.path))
