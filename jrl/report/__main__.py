"""``python -m jrl.report RUN [RUN ...] [--out FILE]`` writes runs as one page."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from jrl.command_line import exit_status, parse_flags
from jrl.program import program
from jrl.report.page import write_page
from jrl.runs.folder import RunFolder


@dataclass(frozen=True)
class ReportOptions:
    """Arguments of ``python -m jrl.report``."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run folders; several are drawn in one plot each."""
    out: str | None = None
    """The page; by default report.html in the folder of a single run, and in the working directory
    if there are several."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    request = parse_flags(
        ReportOptions,
        program("report"),
        arguments,
        (
            "Writes a report of runs as one HTML page: curves, samples, time, settings. It needs "
            "no network."
        ),
    )
    if not request.runs:
        raise ValueError("runs=() names no run: give at least one run folder")
    folders = [RunFolder.read(path) for path in request.runs]
    for folder in folders:
        if not folder.metrics_path.exists():
            raise ValueError(
                f"run folder {folder.path} has no metrics.jsonl: it has no step to show; wait for "
                "its first evaluation, or give another run"
            )
    default_path = folders[0].report_path if len(folders) == 1 else Path("report.html")
    out = None if request.out is None else os.path.expanduser(request.out)
    path = write_page(folders, out or default_path)
    print(f"report: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
