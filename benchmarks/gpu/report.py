"""The table as it is printed while it fills, and as it is kept: JSON and Markdown."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.rows import Figures
from benchmarks.gpu.targets import TARGETS, beside_best, verdict

SHOWN = ("row", "form", "part", "milliseconds")
REASONS = {"needs": "needs", "failed": "failed:", "left_out": "left out:"}
"""Why a row has no figures."""


def line_of(row: Figures) -> str:
    """A row in one line."""
    named = f"{row['row']:48}{row['form']:26}"
    for reason, said in REASONS.items():
        if reason in row:
            return f"{named}{said} {row[reason]}"
    milliseconds = row.get("milliseconds")
    took = " " * 15 if milliseconds is None else f"{milliseconds:>12,.3f} ms"
    return f"{named}{took}  {_rest(row)}"


def _rest(row: Figures) -> str:
    """All else that is known, in words."""
    return ", ".join(f"{name} {_number(row[name])}" for name in row if name not in SHOWN)


def _number(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def kept(about: Figures, rows: Sequence[Figures]) -> Figures:
    """All that was measured and what it is worth."""
    promised = []
    for target in TARGETS:
        word, value = verdict(target, rows)
        promised.append({"promise": target.title, "verdict": word, "value": value})
    return {**about, "rows": list(rows), "promises": promised}


def write(folder: Path, figures: Figures) -> None:
    """``gpu-DATE-DEVICE.json`` and ``.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    device = "".join(c if c.isalnum() else "-" for c in figures["device"].lower()).strip("-")
    path = folder / f"gpu-{figures['date']}-{device}"
    path.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(figures))


def markdown(figures: Figures) -> str:
    """The same for people."""
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    lines = [
        f"# {figures['device']}, {figures['date']}",
        "",
        f"{figures['platform']}; {versions}; seed {figures['seed']}; "
        f"{figures['seconds']:.0f} s in all."
        + (" Small sizes: the times say nothing." if figures["small"] else ""),
        "",
        "| promise | value | verdict |",
        "|---|---|---|",
    ]
    for one in figures["promises"]:
        value = "" if one["value"] is None else f"{one['value']:.2f}"
        lines.append(f"| {one['promise']} | {value} | {one['verdict']} |")
    heads = ("row", "form", "ms", "rate", "of the ceiling", "best other / it", "and")
    lines += ["", f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|---|"]
    return "\n".join(lines + [_table_line(row, figures["rows"]) for row in figures["rows"]]) + "\n"


RATES = {"teraflops": "TFLOP/s", "gigabytes_per_s": "GB/s"}
CEILINGS = {"of_dense": "of the dense rate", "of_copy": "of the copy"}


def _table_line(row: Figures, rows: Sequence[Figures]) -> str:
    for reason, said in REASONS.items():
        if reason in row:
            return f"| {row['row']} | {row['form']} | | | | | {said} {row[reason]} |"
    rate = [f"{_number(row[name])} {unit}" for name, unit in RATES.items() if name in row]
    share = [f"{row[name]:.2f} {what}" for name, what in CEILINGS.items() if name in row]
    ratio = beside_best(rows, row["row"], row["form"])
    rest = {k: v for k, v in row.items() if k not in RATES and k not in CEILINGS}
    cells = (
        row["row"],
        row["form"],
        _number(row["milliseconds"]) if "milliseconds" in row else "",
        rate[0] if rate else "",
        share[0] if share else "",
        "" if ratio is None else f"{ratio:.2f}",
        _rest(rest),
    )
    return f"| {' | '.join(cells)} |"


def today() -> str:
    return time.strftime("%Y-%m-%d")
