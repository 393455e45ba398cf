"""Checks and measures this library on one accelerator, row by row.

Every kernel is compared with float32 on fresh numbers and timed beside its alternatives; then come
a whole layer of experts, training steps, prefill and decoding, and one GRPO step. Rates stand
beside what this device does with a large copy and a large product, measured first. What fails, does
not fit, takes too long or needs what is not here is a row that says so.

    python -m benchmarks.gpu --out benchmarks/results

On a CPU everything runs once at sizes that take no time.
"""

import argparse
import secrets
import sys
import time
from pathlib import Path

from benchmarks.gpu.measure import measure
from benchmarks.gpu.parts import PARTS, chosen
from benchmarks.gpu.processes import serve
from benchmarks.gpu.report import kept, today, write
from benchmarks.gpu.rows import Settings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Measures this library on one accelerator"
    )
    command.add_argument(
        "--rows",
        nargs="+",
        choices=list(PARTS),
        metavar="NAME",
        help=f"benchmarks to run, of {', '.join(PARTS)}; tilings only if named",
    )
    command.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="rows with any of these in their name"
    )
    command.add_argument("--small", action="store_true", help="tiny sizes")
    command.add_argument("--minutes", type=float, default=8.0, help="time limit of the run")
    command.add_argument("--seed", type=int, help="random seed (default: a new one)")
    command.add_argument("--torch", default=sys.executable, help="Python interpreter with PyTorch")
    command.add_argument("--out", type=Path, help="folder for the results, JSON and Markdown")
    command.add_argument("--child", help=argparse.SUPPRESS)
    return command


def main() -> None:
    arguments = parser().parse_args()
    if arguments.child:
        serve(arguments.child)
        return
    if not arguments.minutes > 0:
        parser().error(f"--minutes {arguments.minutes}: must be above 0.")
    began = time.monotonic()
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    settings = Settings(small=True if arguments.small else None, seed=seed, only=arguments.only)
    until = began + 60 * arguments.minutes
    about, rows, _ = measure(chosen(arguments.rows), arguments.torch, settings, until)
    about |= {"date": today(), "seed": seed, "seconds": time.monotonic() - began}
    figures = kept(about, rows)
    for one in figures["promises"]:
        value = "" if one["value"] is None else f"{one['value']:8.2f}"
        print(f"{one['promise']:86}{one['verdict']:8}{value}")
    print(f"{len(rows)} rows, {about['seconds']:.0f} s")
    if arguments.out:
        write(arguments.out, figures)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
