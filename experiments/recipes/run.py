"""Trains every recipe on two tasks, and GRPO with shuffled rewards, and prints the gains.

python experiments/recipes/run.py
"""

import argparse
import sys
from pathlib import Path

from experiments.commands import complete
from jrl.runs.records import read_metrics

RUNS = [
    *(("grpo", "sort", seed, False) for seed in (0, 1, 2)),
    ("grpo", "addition", 0, False),
    *(
        (recipe, task, 0, False)
        for recipe in ("ppo", "dapo", "vapo", "tppo", "hapo")
        for task in ("sort", "addition")
    ),
    *(
        (recipe, "sort", 0, False)
        for recipe in ("dr_grpo", "rloo", "maxrl", "gspo", "cispo", "reinforce_plus_plus")
    ),
    ("grpo", "sort", 0, True),
]
"""Recipe, task, seed, and whether the rewards are shuffled over the batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains every recipe and prints the accuracies")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments/recipes"))
    parser.add_argument("--task", choices=["sort", "addition"], help="run only on this task")
    arguments = parser.parse_args()
    print("| recipe | task | seed | rewards | sampled before | after | greedy before | after |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for recipe, task, seed, shuffled in RUNS:
        if arguments.task not in (None, task):
            continue
        folder = arguments.runs / f"{recipe}-{task}-{seed}{'-shuffled' if shuffled else ''}"
        train(folder, recipe, task, seed, shuffled)
        print(row(folder, recipe, task, seed, shuffled), flush=True)


def train(folder: Path, recipe: str, task: str, seed: int, shuffled: bool) -> None:
    """One run of 80 steps with the default settings, resumed if the folder is there already."""
    command = [sys.executable, "-m", "jrl.train", "--run-dir", str(folder)]
    if folder.exists():
        command.append("--resume")
    else:
        command[3:3] = [recipe]
        command += [
            "--steps",
            "80",
            "--task",
            task,
            "--seed",
            str(seed),
            *["--shuffle-rewards"] * shuffled,
        ]
    complete(command, quiet=True)


def row(folder: Path, recipe: str, task: str, seed: int, shuffled: bool) -> str:
    """A line of the table: held-out accuracy after the warm start and at the end."""
    evaluations = [
        metrics
        for metrics in read_metrics(folder / "metrics.jsonl")
        if "val/accuracy/sampled" in metrics
    ]
    first, last = evaluations[0], evaluations[-1]
    numbers = [
        f"{metrics[f'val/accuracy/{kind}']:.3f}"
        for kind in ("sampled", "greedy")
        for metrics in (first, last)
    ]
    rewards = "shuffled" if shuffled else "real"
    return f"| {recipe} | {task} | {seed} | {rewards} | {' | '.join(numbers)} |"


if __name__ == "__main__":
    main()
