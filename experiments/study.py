"""Variants of a training command over seeds, from warm starts that they share.

A study runs ``python -m jrl.train`` for every variant and seed and keeps one line per evaluation in
``results.csv`` beside it. A run that is there already is gone on with, so a study that was
interrupted is completed by the same command.
"""

import argparse
import csv
import hashlib
import json
import multiprocessing
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from jrl.runs.records import read_metrics
from jrl.train import main

TASK = "scratchpad:4-20"
"""Additions written digit by digit: responses of 44 to 222 tokens, 90 on average, with a
heavy tail of lengths, and no mark but for the right sum."""
LENGTH = "--response-length 224"
WARM_START = f"--warm-start-accuracy 0.3 --eval-prompts 64 {LENGTH}"
COMMON = (
    "--prompts 16 --group-size 8 --mini-batch 32 --learning-rate 1e-4 --learning-rate-warmup 16 "
    f"--packing True --eval-every 15 --eval-prompts 256 {LENGTH}"
)
"""128 completions a step and four updates, at a learning rate that plain GRPO still stands here:
twice of it unlearns the warm start."""
ACCURACY = "val/accuracy/sampled"


@dataclass(frozen=True)
class Study:
    """One question.

    Args:
      folder: where its results lie.
      variants: command lines after ``python -m jrl.train``, by the names of the variants; the
        recipe comes first.
      steps: of training, where a variant does not say.
      common: what all variants share.
      metrics: kept beside accuracy, each a mean over the steps since the evaluation before.
      seeds: of the runs, and each of a warm start.
      task: that all variants learn.
      warm_start: how the warm starts of that task are trained.
    """

    folder: Path
    variants: Mapping[str, str]
    steps: int = 60
    common: str = COMMON
    metrics: Sequence[str] = ("critic/score/mean", "actor/entropy", "response_length/mean")
    seeds: Sequence[int] = (0, 1, 2)
    task: str = TASK
    warm_start: str = WARM_START

    @property
    def results(self) -> Path:
        return self.folder / "results.csv"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("variant", "seed", *FIXED, *self.metrics)


FIXED = ("step", "sampled_tokens", "decode_steps", "seconds", "accuracy")
"""Numbers of every line: the first four are totals since the warm start, without evaluations
and without compilation."""


@dataclass(frozen=True)
class Curve:
    """One run as its evaluations saw it.

    Attributes:
      variant, seed: which it is.
      numbers: by their names in ``results.csv``, a value per evaluation.
    """

    variant: str
    seed: int
    numbers: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def accuracy(self) -> list[float]:
        return self.numbers["accuracy"]

    @property
    def final(self) -> float:
        """Held-out accuracy at the end: a mean over the last two evaluations."""
        return sum(self.accuracy[-2:]) / 2

    def at(self, quantity: str, budget: float) -> float:
        """Accuracy when so much was spent, on the line between two evaluations."""
        spent = self.numbers[quantity]
        for place in range(1, len(spent)):
            if spent[place] >= budget:
                part = (budget - spent[place - 1]) / (spent[place] - spent[place - 1])
                before, after = self.accuracy[place - 1 : place + 1]
                return before + part * (after - before)
        return self.accuracy[-1]

    def until(self, accuracy: float, quantity: str) -> float | None:
        """What was spent until the accuracy was reached, on the line between two evaluations; None
        where it never was."""
        spent = self.numbers[quantity]
        for place in range(1, len(spent)):
            before, after = self.accuracy[place - 1 : place + 1]
            if after >= accuracy:
                part = 0.0 if after == before else max(0.0, (accuracy - before) / (after - before))
                return spent[place - 1] + part * (spent[place] - spent[place - 1])
        return None


def command_line(study: Study) -> list[Curve]:
    """Runs what a study lacks, writes its results and gives them: the main function of each."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel runs")
    parser.add_argument(
        "--only", nargs="*", help="variants to run; the table has all finished ones"
    )
    parser.add_argument(
        "--drawn", action="store_true", help="only draw from results.csv, without training"
    )
    arguments = parser.parse_args()
    if not arguments.drawn:
        wanted = [name for name in study.variants if not arguments.only or name in arguments.only]
        try:
            train(study, wanted, arguments.runs, arguments.jobs)
        except KeyboardInterrupt:
            print("stopped; run the same command to resume", file=sys.stderr)
            raise SystemExit(130) from None
        write(study, arguments.runs)
    return read(study)


def train(study: Study, variants: Sequence[str], runs: Path, jobs: int) -> None:
    """Runs variants over all seeds: one after another on each of so many cores, in one process,
    where what a run has traced and compiled is there for the next."""
    context = multiprocessing.get_context("spawn")
    cores, stopping = context.SimpleQueue(), context.Event()
    for number in range(jobs):
        cores.put(number)
    warm_starts = [_warm_start(study, runs, seed) for seed in study.seeds]
    pending = [
        arguments_of(study, variant, runs, seed) for seed in study.seeds for variant in variants
    ]
    with ProcessPoolExecutor(jobs, context, _stay_on_a_core, (cores, stopping)) as pool:
        try:
            for lines in (warm_starts, pending):
                list(pool.map(_run, lines))
        except KeyboardInterrupt:
            stopping.set()
            print(
                "Ctrl-C: runs finish and save their step; Ctrl-C again stops immediately",
                file=sys.stderr,
                flush=True,
            )
            raise
        except BaseException:  # of a run that failed: the others come to their ends
            stopping.set()
            raise


class _Worker:
    """What a process of the pool knows.

    Attributes:
      stopping: set when no further run is to begin, though some wait in its queue.
      on_interrupt: what a run does at Ctrl-C, which reaches all processes; between runs nothing.
    """

    stopping: Event | None = None
    on_interrupt: Any = signal.SIG_DFL


def _stay_on_a_core(cores: "SimpleQueue[int]", stopping: Event) -> None:
    _Worker.stopping = stopping
    _Worker.on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    number = cores.get()
    if sys.platform == "linux":
        there = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {there[number % len(there)]})


def _warm_start(study: Study, runs: Path, seed: int) -> list[str]:
    # Another stream of prompts than that of the runs that begin with its weights.
    line = f"grpo --task {study.task} --steps 0 --seed {1000 + seed} {study.warm_start}"
    return [*shlex.split(line), "--run-dir", str(_warm_folder(study, runs, seed))]


def arguments_of(study: Study, variant: str, runs: Path, seed: int) -> list[str]:
    recipe, *own = shlex.split(study.variants[variant])
    line = f"{recipe} --task {study.task} --seed {seed} --steps {study.steps} {study.common}"
    weights = ["--weights", str(_warm_folder(study, runs, seed)), "--checkpoint-every", "1000"]
    folder = ["--run-dir", str(folder_of(study, variant, runs, seed))]
    # The last of two equal flags counts: a variant's own comes after what all share.
    return [*shlex.split(line), *weights, *own, *folder]


def _warm_folder(study: Study, runs: Path, seed: int) -> Path:
    line = _of_task(study, study.warm_start)
    name = "warm-start" if line == WARM_START else f"warm-start-{_digest(line)}"
    return runs / f"{name}-{seed}"


def folder_of(study: Study, variant: str, runs: Path, seed: int) -> Path:
    # By what is run: studies that ask for the same share it.
    line = _of_task(study, f"{study.variants[variant]} {study.common} --steps {study.steps}")
    return runs / f"{line.split()[0]}-{_digest(line)}-{seed}"


def _of_task(study: Study, line: str) -> str:
    return line if study.task == TASK else f"{line} --task {study.task}"


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:8]


def _run(arguments: list[str]) -> None:
    """A run in this process, unless it has come to its end before."""
    folder = Path(arguments[arguments.index("--run-dir") + 1])
    if has_ended(folder) or (_Worker.stopping is not None and _Worker.stopping.is_set()):
        return
    if folder.exists():
        arguments = ["--run-dir", str(folder), "--resume"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{folder}.log")
    with log.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        between = signal.signal(signal.SIGINT, _Worker.on_interrupt)
        try:
            status = main(arguments)
        finally:
            signal.signal(signal.SIGINT, between)
    if status or not has_ended(folder):
        line = shlex.join(["python", "-m", "jrl.train", *arguments])
        raise SystemExit(f"{line} {'failed' if status else 'was stopped'}: see {log}")


def has_ended(folder: Path) -> bool:
    """Whether a run came to its end: one that was stopped on the way has plots, too."""
    if not (folder / "plots").exists():
        return False
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read_metrics(folder / "metrics.jsonl")[-1]["step"] >= config["run"]["steps"]


def write(study: Study, runs: Path) -> None:
    """``results.csv`` from the runs that came to their ends."""
    with study.results.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(study.columns)
        for variant in study.variants:
            for seed in study.seeds:
                folder = folder_of(study, variant, runs, seed)
                if has_ended(folder):
                    for row in _evaluations(study, folder):
                        lines.writerow([variant, seed, *(f"{number:.6g}" for number in row)])


def _evaluations(study: Study, folder: Path) -> list[list[float]]:
    """A line of numbers for each evaluation of a run."""
    totals = {"perf/sampled_tokens": 0.0, "perf/decode_steps": 0.0}
    seconds, since, rows = 0.0, list[Mapping[str, float]](), list[list[float]]()
    for metrics in read_metrics(folder / "metrics.jsonl"):
        if metrics["step"]:
            since.append(metrics)
        for name in totals:
            totals[name] += metrics.get(name, 0.0)
        if ACCURACY not in metrics:
            continue
        # A step that compiles a program takes as long as twenty others: of those between two
        # evaluations each counts as their median.
        if since:
            times = [step["perf/time_per_step"] for step in since]
            seconds += statistics.median(times) * len(times)
        means = (_mean([step[name] for step in since if name in step]) for name in study.metrics)
        rows.append([metrics["step"], *totals.values(), seconds, metrics[ACCURACY], *means])
        since = []
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def read(study: Study) -> list[Curve]:
    """The curves of ``results.csv``, in the order of the variants."""
    curves: dict[tuple[str, int], Curve] = {}
    with study.results.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = row["variant"], int(row["seed"])
            curve = curves.setdefault(key, Curve(*key, {name: [] for name in study.columns[2:]}))
            for name, values in curve.numbers.items():
                values.append(float(row[name]))
    order = {variant: place for place, variant in enumerate(study.variants)}
    return sorted(curves.values(), key=lambda curve: (order[curve.variant], curve.seed))
