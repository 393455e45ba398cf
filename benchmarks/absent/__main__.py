"""Compiles kernels and training steps for accelerators that are not here, with their compilers.

    python -m benchmarks.absent                      # everything
    python -m benchmarks.absent kernels              # the table of Mosaic GPU kernels
    python -m benchmarks.absent steps --only v5e

The status is 1 where a compiler refuses one.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.absent import compilers, programs, rows
from benchmarks.absent.report import KERNELS, MEGABLOX, STEPS, line_of, summary, today, write

PARTS: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], tuple[str, ...]]] = {
    KERNELS: (rows.gpu_kernels, ("cuda",)),
    MEGABLOX: (rows.tpu_kernels, ("tpu",)),
    STEPS: (programs.steps, ("cuda", "tpu")),
}
"""Rows of each part, and the platforms whose compilers it needs."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.absent",
        description="Compiles kernels and training steps for accelerators that are not here",
    )
    command.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all"
    )
    command.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help='rows whose "device model operation" or "device program layout" contains one of these',
    )
    command.add_argument("--quick", action="store_true", help="each kernel at one shape, few steps")
    command.add_argument("--out", type=Path, help="folder for absent.json and absent.md")
    command.add_argument("--keep", type=Path, help="folder for PTX and machine code of kernels")
    return command


def main() -> None:
    arguments = parser().parse_args()
    parts = arguments.parts or list(PARTS)
    for part in parts:
        if part not in PARTS:
            parser().error(f"PART {part!r}: choose among {', '.join(PARTS)}.")
    for platform in dict.fromkeys(platform for part in parts for platform in PARTS[part][1]):
        if (reason := compilers.missing(platform)) is not None:
            parser().error(reason)
    compilers.prepare()
    figures: dict[str, Any] = {"date": today(), "versions": compilers.versions()}
    for part in parts:
        figures[part] = []
        for row in PARTS[part][0](arguments.only, quick=arguments.quick, keep=arguments.keep):
            print(line_of(row), flush=True)
            figures[part].append(row)
            # What was compiled is kept when the rest is cut off.
            if arguments.out:
                write(arguments.out, figures)
    print(summary(figures))
    if any("error" in row for part in parts for row in figures[part]):
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
