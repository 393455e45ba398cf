"""Questions for one GPU that is lent for a quarter of an hour, in order of value, with predictions.

Each question is some rows of `benchmarks.gpu`, with a limit in seconds that includes compilation.
Results are written after each, with what was predicted, so that a run that is cut short keeps what
it has. The questions are asked in two calls, so that no command runs longer than ten minutes.

    bash benchmarks/gpu/quarter.sh first
    bash benchmarks/gpu/quarter.sh second
    bash benchmarks/gpu/quarter.sh --small

With ``--small`` all rows of each question's parts run at sizes that take no time, on a CPU too.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.measure import measure
from benchmarks.gpu.report import line_of, today
from benchmarks.gpu.rows import Figures, Settings

START = 90
"""Seconds until a machine that is lent runs the first command."""
CALLS = ("first", "second")
CLOCKS = "clocks.sm,power.draw"
"""What `nvidia-smi` is asked every two seconds: MHz and watts. At the limit of power, rates fall
with the clock."""


class Question(NamedTuple):
    """A question.

    Attributes:
      name: of the question.
      call: of `CALLS`, that it is asked in.
      seconds: limit of all its rows.
      question: what is asked.
      prediction: what is expected; "measured" if a device has said so, else computed.
      then: what the answer decides.
      parts: of `benchmarks.gpu.parts.PARTS`, whose rows answer it.
      only: parts of the names of these rows.
    """

    name: str
    call: str
    seconds: int
    question: str
    prediction: str
    then: str
    parts: tuple[str, ...]
    only: tuple[str, ...] = ()


def _ceilings(call: str) -> Question:
    return Question(
        *("ceilings", call, 30),
        "How fast are the fastest copy of 2 GiB and a product of 8192 x 8192 bfloat16?",
        "Device to device and take_rows 4.2 to 4.3 TB/s, negation 3.3 (measured); product 705 to "
        "715 TFLOP/s (measured).",
        "Bandwidth is given as a share of that copy.",
        ("ceilings",),
    )


QUESTIONS = (
    _ceilings("first"),
    Question(
        *("decoding", "first", 110),
        "What do slices of weights and updated graphs of scanned layers cost a decode step?",
        "Scanned 10.7 ms (measured), unrolled 7.7 to 9.2.",
        "The faster one is the default of sampling.",
        ("decode",),
        tuple(f"0.6b dense/256 rows, tokens 1 to 1000 {form}" for form in ("unrolled", "scanned")),
    ),
    Question(
        *("one row", "first", 60),
        "What does the host cost a decode step of one row?",
        "Scanned 2.5 to 3.5 ms, unrolled 1.0 to 1.3.",
        "If unrolled is above 1.5 ms, the window is not one CUDA graph: look at its thunks.",
        ("decode",),
        tuple(f"0.6b dense/1 rows, tokens 1 to 256 {form}" for form in ("unrolled", "scanned")),
    ),
    Question(
        *("decode attention", "first", 40),
        "What share of the copy does the attention kernel of a decode step reach?",
        "0.60 to 0.75 of it with one block of columns in flight, 0.85 with several.",
        "Below 0.75 the kernel comes before every other part of the step.",
        ("cached",),
        (" mosaic",),
    ),
    Question(
        *("uneven groups", "first", 75),
        "What do groups of unequal sizes cost grouped products, here and in PyTorch?",
        "Ours 0.80 to 0.90 of the rate of equal groups with 128 and 256 groups, PyTorch's 0.95.",
        "Below 0.90 tiles begin at a group's first row and not at multiples of 128.",
        ("grouped", "uneven", "torch"),
        (" mosaic", " torch"),
    ),
    Question(
        *("update", "first", 110),
        "What is the trainer's update of a device that is full, and what do all logits gain?",
        "Dense 0.53 to 0.56 of the datasheet's rate; of half the rows 0.01 less, with all logits "
        "0.015 more than that; mixture 0.42 to 0.46.",
        "If all logits gain nothing, a run leaves `vocab_chunk` at 8192 whatever is free.",
        ("step",),
        ("3.2b dense as it is", "3.6b moe as it is", "3.2b dense half the rows"),
    ),
    Question(
        *("experts layer", "first", 50),
        "How long is a layer of experts, forward and backward?",
        "18 to 20 ms for 32,768 tokens of Qwen3-30B-A3B; with no kernels 45 or more.",
        "The promise of 1.5 times the best plain form is reached or missed.",
        ("layer",),
        ("/both mosaic", "/both batched"),
    ),
    _ceilings("second"),
    Question(
        *("grpo", "second", 120),
        "What is a GRPO step of Qwen3-0.6B as a run takes it?",
        "12.3 s with 27,000 sampled tokens/s (measured); 10.5 s and 33,000 with unrolled layers.",
        "The figures of the pages.",
        ("grpo",),
    ),
    Question(
        *("tilings", "second", 45),
        "Do tiles of 128 x 192 or more stages pass the rate of 128 x 128?",
        "No tiling passes 640 TFLOP/s at 7,168 elements of depth if the L2 cache is the limit.",
        "If one does, it is the default; if none does, tiles are shared by a cluster of two.",
        ("tilings",),
    ),
    Question(
        *("attention and head", "second", 60),
        "What do training attention and the head reach by themselves?",
        "cuDNN 550 TFLOP/s forward and 450 with gradients; the head 0.75 of the dense rate in "
        "chunks of 8,192 columns, 0.9 with all logits.",
        "The parts of the table of an update.",
        ("attention", "head"),
        ("attention/2 x 4096/forward cudnn", "attention/2 x 4096/both cudnn", "head/"),
    ),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.quarter", description="Asks one GPU, in order of value"
    )
    command.add_argument("calls", nargs="*", metavar="CALL", help=f"of {', '.join(CALLS)}")
    command.add_argument("--small", action="store_true", help="tiny sizes, on a CPU too")
    command.add_argument("--torch", default=sys.executable, help="Python interpreter with PyTorch")
    command.add_argument("--out", type=Path, required=True, help="folder for the results")
    return command


def main() -> None:
    arguments = parser().parse_args()
    calls = arguments.calls or CALLS
    if not set(calls) <= set(CALLS):
        parser().error(f"{' '.join(calls)}: calls are {' and '.join(CALLS)}.")
    settings = Settings(small=True if arguments.small else None, seed=secrets.randbelow(2**31))
    about: Figures = {"date": today(), "seed": settings.seed}
    answers: list[Figures] = []
    for question in QUESTIONS:
        repeats = settings.small and any(one["parts"] == question.parts for one in answers)
        if question.call not in calls or repeats:
            continue
        print(f"\n{question.name}: {question.question}\n  predicted: {question.prediction}")
        found, answer, settings = ask(question, arguments.torch, settings)
        about |= found | {"versions": about.get("versions", {}) | found["versions"]}
        answers.append(answer)
        write(arguments.out, "-".join(calls), about | {"questions": answers})


def ask(question: Question, torch: str, settings: Settings) -> tuple[Figures, Figures, Settings]:
    """What the rows ran on, the question with its rows, and the settings with the ceilings."""
    # Rows of small sizes have other names.
    limited = replace(settings, only=() if settings.small else question.only)
    began = time.monotonic()
    seconds = question.seconds * (10 if settings.small else 1)
    with clocks() as seen:
        about, rows, measured = measure(question.parts, torch, limited, began + seconds)
    took = {"took_s": time.monotonic() - began, **seen}
    return about, {**question._asdict(), **took, "rows": rows}, measured


@contextmanager
def clocks() -> Iterator[Figures]:
    """Medians of `CLOCKS` while something runs, in a mapping that is filled at the end; empty if
    there is no `nvidia-smi`."""
    seen: Figures = {}
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits", "--loop=2"]
    try:
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        yield seen
        return
    try:
        yield seen
    finally:
        watching.terminate()
        said, _ = watching.communicate()
        seen |= medians(said)


def medians(lines: str) -> Figures:
    """Medians of lines with a number for each of `CLOCKS`; lines without are passed over."""
    import statistics

    read = []
    for line in lines.splitlines():
        try:
            read.append([float(number) for number in line.split(",")])
        except ValueError:
            continue
    names = [name.replace(".", "_") for name in CLOCKS.split(",")]
    columns = zip(*(one for one in read if len(one) == len(names)), strict=True)
    return dict(zip(names, map(statistics.median, columns), strict=False))


def write(folder: Path, calls: str, figures: Figures) -> None:
    """``quarter-DATE-CALLS.json`` and ``.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"quarter-{figures['date']}-{calls}"
    written = path.with_suffix(".json.new")
    written.write_text(json.dumps(figures, indent=1) + "\n")
    os.replace(written, path.with_suffix(".json"))
    path.with_suffix(".md").write_text(page(figures))


def page(figures: Figures) -> str:
    """Questions, predictions and rows for people."""
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    small = " Small sizes: the times say nothing." if figures["small"] else ""
    lines = [f"# {figures['device']}, {figures['date']}", "", f"{versions}.{small}"]
    for one in figures["questions"]:
        lines += ["", f"## {one['name'].capitalize()}", "", one["question"], ""]
        lines += [f"* predicted: {one['prediction']}", f"* decides: {one['then']}", "", "```"]
        lines += [*map(line_of, one["rows"]), "```"]
    return "\n".join(lines) + "\n"


def limits(calls: Sequence[str] = CALLS) -> int:
    """Seconds of all questions of some calls."""
    return sum(question.seconds for question in QUESTIONS if question.call in calls)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
