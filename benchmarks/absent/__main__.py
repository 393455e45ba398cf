"""Compiles kernels and training steps for accelerators that are not here, with their compilers.

    python -m benchmarks.absent                      # everything
    python -m benchmarks.absent kernels              # the table of Mosaic GPU kernels
    python -m benchmarks.absent steps --only v5p
    python -m benchmarks.absent schedule launches    # overlap, and number of kernel launches
    python -m benchmarks.absent exchanges            # bytes of token dispatch between servers
    python -m benchmarks.absent plan ...             # layouts of the planner, with its arguments

The status is 1 where a compiler refuses one.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.absent import compilers
from benchmarks.absent.parts import PARTS, rows_of
from benchmarks.absent.report import line_of, read, summary, today, write
from benchmarks.absent.rows import merged
from benchmarks.absent.workers import Compiled, Work, compiled_rows, cores

PLAN = "plan"
"""A command of its own, with the arguments of the planner (`benchmarks.absent.plan`)."""


def positive(text: str) -> int:
    """A number of processes.

    Raises:
      ArgumentTypeError: for less than 1.
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.absent",
        description="Compiles kernels and training steps for accelerators that are not here",
    )
    command.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"{', '.join(PARTS)}; default: all. Or {PLAN} and the arguments of moe.planner, "
        "whose layouts are compiled",
    )
    command.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help='rows whose "device model operation" or "device program layout" contains one of these',
    )
    command.add_argument("--quick", action="store_true", help="each kernel at one shape, few steps")
    command.add_argument(
        "--processes",
        type=positive,
        default=cores(),
        metavar="N",
        help="that compile at a time, with up to 4 GB of memory each; default: one for each core",
    )
    command.add_argument("--out", type=Path, help="folder for absent.json and absent.md")
    command.add_argument(
        "--keep", type=Path, help="folder for PTX, machine code and scheduled programs"
    )
    return command


def main() -> None:
    if sys.argv[1:2] == [PLAN]:
        from benchmarks.absent.plan import main as compile_plans

        raise SystemExit(compile_plans(sys.argv[2:]))
    arguments = parser().parse_args()
    parts = arguments.parts or list(PARTS)
    for part in parts:
        if part not in PARTS:
            parser().error(f"PART {part!r}: choose among {', '.join(PARTS)}.")
    for platform in dict.fromkeys(platform for part in parts for platform in PARTS[part]):
        if (reason := compilers.missing(platform)) is not None:
            parser().error(reason)
    figures: dict[str, Any] = {"date": today(), "versions": compilers.versions()}
    if arguments.out is not None:
        try:
            figures = read(arguments.out, figures)
        except ValueError as error:
            parser().error(str(error))
    compilers.prepare()
    # With names, the rows of all others stay as they were.
    before = {part: figures.get(part, []) if arguments.only else [] for part in parts}
    found: dict[str, list[Compiled]] = {part: [] for part in parts}
    names = tuple(arguments.only)
    work = Work(tuple(parts), rows_of, names, arguments.quick, arguments.keep)
    refused = False
    for compiled in compiled_rows(work, arguments.processes):
        part = compiled.part
        print(line_of(compiled.row), flush=True)
        refused |= "error" in compiled.row
        found[part].append(compiled)
        in_order = sorted(found[part], key=lambda one: one.place)
        figures[part] = merged(before[part], [one.row for one in in_order])
        # What was compiled is kept when the rest is cut off.
        if arguments.out:
            write(arguments.out, figures)
    print(summary(figures))
    if refused:
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
