"""Two tasks of conversations, three seeds each: before and after reinforcement.

python -m experiments.conversations.run
"""

import argparse
import csv
import shutil
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from experiments.commands import complete
from experiments.figures import COMPARED, markdown, plain, save
from jrl.report.plots import INK, MUTED
from jrl.runs.records import read_metrics

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.csv"
SEEDS = (0, 1, 2)
STEPS = 40
TASKS: dict[str, list[str]] = {
    "guess": [],
    # Faster, it goes from no right answer to half of them between two of its looks.
    "calculator": ["--warm-start-learning-rate", "1e-3"],
}
"""Flags of each."""
ACCURACY = "val/accuracy/sampled"


@dataclass(frozen=True)
class Line:
    """One run.

    Attributes:
      before, after: held-out accuracy of the warm start and at the end, one conversation of each
        prompt.
      turns: of the policy in a conversation, at the end.
      minutes: from the command to its end, the warm start with it.
    """

    task: str
    seed: int
    before: float
    after: float
    turns: float
    minutes: float


def command(task: str, seed: int, folder: Path) -> list[str]:
    """A run as anyone would begin it."""
    return [
        *(sys.executable, "-m", "jrl.train", "grpo", "--task", task, "--seed", str(seed)),
        *("--steps", str(STEPS), "--eval-every", str(STEPS // 2), "--learning-rate", "5e-4"),
        *("--warm-start-batch", "64", *TASKS[task]),
        *("--run-dir", str(folder)),
    ]


def run(task: str, seed: int, runs: Path) -> Line:
    """Trains, unless that was done before, and reads what came of it."""
    folder = runs / f"{task}-{seed}"
    minutes = folder / "minutes.txt"
    if not minutes.exists():
        if folder.exists():  # stopped on the way: its minutes would not be those of a run
            shutil.rmtree(folder)
        begin = time.monotonic()
        complete(command(task, seed, folder))
        minutes.write_text(f"{(time.monotonic() - begin) / 60:.3f}\n")
    metrics = [line for line in read_metrics(folder / "metrics.jsonl") if ACCURACY in line]
    return Line(
        task,
        seed,
        before=metrics[0][ACCURACY],
        after=metrics[-1][ACCURACY],
        turns=metrics[-1]["val/conversation/turns"],
        minutes=float(minutes.read_text()),
    )


def table(lines: list[Line]) -> str:
    """A row for each run, and one for each task."""
    rows = []
    for task in dict.fromkeys(line.task for line in lines):
        own = [line for line in lines if line.task == task]
        rows += [[task, str(line.seed), *_numbers([line])] for line in own]
        rows.append([task, "mean", *_numbers(own)])
    return markdown(["task", "seed", "warm start", "after", "gain", "turns", "minutes"], rows)


def _numbers(lines: list[Line]) -> list[str]:
    before, after = (np.mean([getattr(line, x) for line in lines]) for x in ("before", "after"))
    turns, minutes = (np.mean([getattr(line, x) for line in lines]) for x in ("turns", "minutes"))
    gain = after - before
    return [f"{before:.3f}", f"{after:.3f}", f"{gain:+.3f}", f"{turns:.2f}", f"{minutes:.1f}"]


def write(lines: list[Line]) -> None:
    """``results.csv``."""
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)])
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)


def read() -> list[Line]:
    """The runs of ``results.csv``."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return [
            Line(row.pop("task"), int(row.pop("seed")), **{x: float(row[x]) for x in row})
            for row in csv.DictReader(file)
        ]


def draw(lines: list[Line], to: Path) -> None:
    """Held-out accuracy before and after: a bar is the mean over seeds, a dot a seed."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.0, 2.4))
    tasks = list(dict.fromkeys(line.task for line in lines))
    for part, colour, aside in (("before", MUTED, -0.2), ("after", COMPARED[0], 0.2)):
        for place, task in enumerate(tasks):
            found = [getattr(line, part) for line in lines if line.task == task]
            label = {"before": "warm start", "after": f"after {STEPS} steps"}[part]
            label = label if place == 0 else None
            axis.barh(place + aside, np.mean(found), 0.36, color=colour, alpha=0.75, label=label)
            axis.plot(found, [place + aside] * len(found), "o", color=INK, ms=4)
    axis.set_yticks(range(len(tasks)), tasks)
    axis.invert_yaxis()
    axis.set_xlabel("held-out accuracy, one conversation per prompt", color=INK)
    axis.set_xlim(0, 1)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    plain(axis)
    save(figure, to, "Two multi-turn tasks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments/conversations"))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument(
        "--drawn", action="store_true", help="only draw from results.csv, without training"
    )
    arguments = parser.parse_args()
    if not arguments.drawn:
        arguments.runs.mkdir(parents=True, exist_ok=True)
        write(
            [
                run(task, seed, arguments.runs)
                for task in arguments.tasks
                for seed in arguments.seeds
            ]
        )
    lines = read()
    print(table(lines))
    draw(lines, FOLDER / "plot.png")


if __name__ == "__main__":
    main()
