"""Parts one after another, their rows shown as they come, beside the ceilings of the device."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu.ceilings import COPY, DENSE
from benchmarks.gpu.parts import CEILINGS, TORCH
from benchmarks.gpu.processes import figures_of
from benchmarks.gpu.report import line_of
from benchmarks.gpu.rows import Figures, Settings
from benchmarks.gpu.targets import of


def measure(
    parts: Sequence[str], torch: str, settings: Settings, until: float
) -> tuple[Figures, list[Figures], Settings]:
    """All rows, shown as they come, what they ran on, and the settings with the ceilings of the
    device once they are measured.

    Args:
      torch: the interpreter with PyTorch.
      until: `time.monotonic` at which no row goes on.
    """
    about: Figures = {"device": "unknown", "platform": "unknown", "small": None, "versions": {}}
    rows: list[Figures] = []
    for part in parts:
        python = torch if part == TORCH else sys.executable
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
    return about, rows, settings


def with_ceilings(settings: Settings, rows: Sequence[Figures]) -> Settings:
    """With the rates of the device, the largest of all forms, which everything after is set
    beside."""
    copy, dense = of(rows, COPY, "gigabytes_per_s"), of(rows, DENSE, "teraflops")
    if copy is not None:
        settings = replace(settings, copy=1e9 * copy)
    if dense is not None:
        settings = replace(settings, dense=1e12 * dense)
    return settings
