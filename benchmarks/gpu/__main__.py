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
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.ceilings import COPY, DENSE
from benchmarks.gpu.parts import CEILINGS, PARTS, TORCH, chosen
from benchmarks.gpu.processes import figures_of, serve
from benchmarks.gpu.report import kept, line_of, today, write
from benchmarks.gpu.rows import Figures, Settings


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
    settings = Settings(small=True if arguments.small else None, seed=seed)
    about, rows = measure(arguments, settings, until=began + 60 * arguments.minutes)
    about |= {"date": today(), "seed": seed, "seconds": time.monotonic() - began}
    figures = kept(about, rows)
    for one in figures["promises"]:
        value = "" if one["value"] is None else f"{one['value']:8.2f}"
        print(f"{one['promise']:86}{one['verdict']:8}{value}")
    print(f"{len(rows)} rows, {about['seconds']:.0f} s")
    if arguments.out:
        write(arguments.out, figures)


def measure(
    arguments: argparse.Namespace, settings: Settings, until: float
) -> tuple[Figures, list[Figures]]:
    """All rows, shown as they come, and what they ran on."""
    about: Figures = {"device": "unknown", "platform": "unknown", "small": None, "versions": {}}
    rows: list[Figures] = []
    for part in chosen(arguments.rows):
        python = arguments.torch if part == TORCH else sys.executable
        for line in figures_of(part, settings, python, until):
            if "about" in line:
                versions = about["versions"] | line["about"].pop("versions")
                about |= line["about"] | {"versions": versions}
                settings = replace(settings, small=about["small"])
                continue
            rows.append(line)
            print(line_of(line), flush=True)
        if part == CEILINGS:
            settings = with_ceilings(settings, rows)
    return about, rows


def with_ceilings(settings: Settings, rows: list[Figures]) -> Settings:
    """With the rates of the device, which everything after is set beside."""
    found = {row["row"]: row for row in rows if "milliseconds" in row}
    if COPY in found:
        settings = replace(settings, copy=1e9 * found[COPY]["gigabytes_per_s"])
    if DENSE in found:
        settings = replace(settings, dense=1e12 * found[DENSE]["teraflops"])
    return settings


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
