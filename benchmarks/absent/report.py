"""The report of compiled kernels and programs: a line for each row, JSON, and Markdown tables."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.absent.descriptions import GPUS, TPUS
from benchmarks.absent.rows import Figures, by_name

KERNELS, STEPS = "kernels", "steps"
SCHEDULE, LAUNCHES, EXCHANGES = "schedule", "launches", "exchanges"
PARTS = KERNELS, STEPS, SCHEDULE, LAUNCHES, EXCHANGES
SIDES = "inside", "across"
"""Bytes of an exchange: of a device's own server, and of others."""
SHOWN = ("HGMMA", "UTMALDG", "LDGSTS", "BAR")
"""Instructions in the table; the JSON has more."""


def line_of(row: Figures) -> str:
    """A row in one line."""
    named = f"{row['device']:6}{row.get('model', row.get('program')):24} "
    named += f"{row.get('operation', row.get('form', row.get('layout'))):36}"
    if "flags" in row:
        named += f"{row['flags']:24}"
    if "error" in row:
        return f"{named}{row['error']}"
    if "registers" in row:
        row = row | {"KiB": row["shared"] / 1024}
        figures = (
            "{kernel:26}{programs:9} programs x {warpgroups}, {resident} resident, {registers:3} "
            "registers, {KiB:5.1f} KiB"
        ).format(**row)
    elif "exposed" in row:
        figures = (
            f"{row['asynchronous']} of {row['collectives']} collectives asynchronous, "
            f"{hidden_share(row):.0%} of {row['communication'] * 1e3:.2f} ms hidden"
        )
    elif "launches" in row:
        figures = f"{row['launches']:,} launches, {row['per_turn']:,} for each further turn"
    elif "planned" in row:
        inside, across = (
            f"{row['compiled'][side] / 1024:,.0f} KiB (planned {row['planned'][side] / 1024:,.0f})"
            for side in SIDES
        )
        figures = f"{inside} inside a server, {across} between servers"
    else:
        figures = f"{row['temporaries'] / 2**30:8.2f} GiB of temporaries"
    defects = "; ".join(row.get("defects", []))
    return f"{named}{figures}, {row['seconds']:5.1f} s{'  ' + defects if defects else ''}"


def summary(figures: Figures) -> str:
    """Number of rows that were compiled, that were refused, and that have a defect."""
    rows = [row for part in PARTS for row in figures.get(part, [])]
    refused = sum("error" in row for row in rows)
    defective = sum(bool(row.get("defects")) for row in rows)
    return f"{len(rows) - refused} compiled, {refused} refused, {defective} with defects"


def seconds_text(figures: Figures) -> str:
    """Processor time that compilation took, of each part and of all."""
    seconds = {
        part: sum(rows[0].get("seconds", 0.0) for rows in by_name(figures[part]).values())
        for part in PARTS
        if figures.get(part)
    }
    parts = ", ".join(f"{part} {total:,.0f} s" for part, total in seconds.items())
    return f"Processor time: {parts}; {sum(seconds.values()):,.0f} s in all"


def hidden_share(row: Figures, part: str = "") -> float:
    """Share of the time of collectives that computation does not wait for.

    Args:
      part: "" for all, "_of_layers" for those of the layers.
    """
    communication = row[f"communication{part}"]
    return 1 - row[f"exposed{part}"] / communication if communication else 1.0


def memory_of(row: Figures) -> int:
    """Bytes of device memory that a program needs, with what is in use beside it."""
    return row["arguments"] + row["temporaries"] + row.get("others", 0)


def read(folder: Path, figures: Figures) -> Figures:
    """The figures that a folder has already, with date and versions of `figures`.

    Raises:
      ValueError: if other versions have made them.
    """
    path = folder / "absent.json"
    if not path.exists():
        return figures
    before = json.loads(path.read_text())
    if before["versions"] != figures["versions"]:
        raise ValueError(
            f"{path} was made by other versions ({_versions_text(before)}): remove it, and compile "
            "all parts, or give another --out."
        )
    return before | figures


def write(folder: Path, figures: Figures) -> None:
    """``absent.json`` and ``absent.md`` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # A row in each line.
    parts = [f'"{name}": {json.dumps(figures[name])}' for name in ("date", "versions")]
    for part in PARTS:
        if part in figures:
            rows = ",\n".join(map(json.dumps, figures[part]))
            parts.append(f'"{part}": [\n{rows}\n]')
    (folder / "absent.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
    (folder / "absent.md").write_text(markdown(figures))


def today() -> str:
    return time.strftime("%Y-%m-%d")


def markdown(figures: Figures) -> str:
    """The rows as Markdown tables, with date and versions."""
    versions = _versions_text(figures)
    said = summary(figures).capitalize(), seconds_text(figures)
    parts = [f"{figures['date']}: {versions}. {'. '.join(said)}."]
    if figures.get(KERNELS):
        parts.append(_kernel_table(figures[KERNELS]))
    if figures.get(STEPS):
        parts.append(_step_table(figures[STEPS]))
    if scheduled := [*_without_flags(figures.get(STEPS, [])), *figures.get(SCHEDULE, [])]:
        parts.append(_schedule_table(scheduled))
    if figures.get(LAUNCHES):
        parts.append(_launch_table(figures[LAUNCHES]))
    if figures.get(EXCHANGES):
        parts.append(_exchange_table(figures[EXCHANGES]))
    return "\n\n".join(parts) + "\n"


def _versions_text(figures: Figures) -> str:
    return ", ".join(f"{name} {version}" for name, version in figures["versions"].items())


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _kernel_table(rows: Sequence[Figures]) -> str:
    head = ["device", "model", "operation", "kernel", "programs", "warpgroups", "resident"]
    head += ["registers", "spilled", "KiB", *SHOWN, "floor, us", "issued, us", "defects"]
    cells = []
    for row in rows:
        named = [row["device"], row["model"], row["operation"]]
        if "error" in row:
            cells.append([*named, *[""] * (len(head) - 4), row["error"]])
            continue
        cells.append(
            [
                *named,
                f"`{row['kernel']}`",
                f"{row['programs']:,}",
                row["warpgroups"],
                row["resident"],
                f"{row['registers']} / {row['alone_registers']}",
                f"{row['spilled']} / {row['alone_spilled']}",
                f"{row['shared'] / 1024:.1f}",
                *(row["instructions"][name] for name in SHOWN),
                f"{row['floor'] * 1e6:.1f}",
                f"{row['issued'] * 1e6:.1f}" if row["issued"] else "",
                "; ".join(row["defects"]),
            ]
        )
    return _table(head, cells)


def _step_table(rows: Sequence[Figures]) -> str:
    head = ["device", "layout", "program", "arguments, GiB", "temporaries, GiB", "others, GiB"]
    head += ["of memory"]
    head += ["predicted, GiB", "ratio", "collectives", "asynchronous", "defects"]
    cells = []
    for row in rows:
        named = [row["device"], row["layout"], row["program"]]
        if "error" in row:
            cells.append([*named, *[""] * (len(head) - 4), row["error"]])
            continue
        needed = memory_of(row)
        sizes = (
            f"{row[name] / 2**30:.1f}" if name in row else ""
            for name in ("arguments", "temporaries", "others")
        )
        share = f"{needed / (GPUS | TPUS)[row['device']].memory:.0%}"
        predicted = ["", ""]
        if "predicted" in row:
            predicted = [f"{row['predicted'] / 2**30:.1f}", f"{row['predicted'] / needed:.2f}"]
        counts = (row.get(name, "") for name in ("collectives", "asynchronous"))
        defects = "; ".join(row.get("defects", []))
        cells.append([*named, *sizes, share, *predicted, *counts, defects])
    return _table(head, cells)


def _without_flags(rows: Sequence[Figures]) -> list[Figures]:
    """Rows of the table of schedules, of programs of `steps`."""
    names = "device", "layout", "program", "temporaries"
    return [
        {name: row[name] for name in names} | {"flags": "without a flag"} | row["overlap"]
        for row in rows
        if "overlap" in row
    ]


def _schedule_table(rows: Sequence[Figures]) -> str:
    head = ["device", "layout", "program", "flags", "collectives", "asynchronous"]
    head += ["communication, ms", "hidden", "of layers, ms", "hidden", "temporaries, GiB"]
    cells = []
    # Those of a program are neighbours.
    programs = [*dict.fromkeys((row["device"], row["program"]) for row in rows)]
    for row in sorted(rows, key=lambda row: programs.index((row["device"], row["program"]))):
        # Pages have flags as code.
        flags = f"`{row['flags']}`" if row["flags"].startswith("-") else row["flags"]
        named = [row["device"], row["layout"], row["program"], flags]
        if "error" in row:
            cells.append([*named, *[""] * (len(head) - 5), row["error"]])
            continue
        figures: list[Any] = [row["collectives"], row["asynchronous"]]
        for part in ("", "_of_layers"):
            figures += [
                f"{row[f'communication{part}'] * 1e3:.1f}",
                f"{hidden_share(row, part):.0%}",
            ]
        cells.append([*named, *figures, f"{row['temporaries'] / 2**30:.1f}"])
    return _table(head, cells)


def _launch_table(rows: Sequence[Figures]) -> str:
    head = ["device", "program", "form", "launches", "more for a further turn of loops"]
    head += ["temporaries, GiB"]
    cells = []
    for row in rows:
        named = [row["device"], row["program"], row["form"]]
        if "error" in row:
            cells.append([*named, "", "", row["error"]])
            continue
        gib = f"{row['temporaries'] / 2**30:.1f}"
        cells.append([*named, f"{row['launches']:,}", f"{row['per_turn']:,}", gib])
    return _table(head, cells)


def _exchange_table(rows: Sequence[Figures]) -> str:
    head = ["device", "layout", "dispatch", "KiB inside a server", "planned"]
    head += ["KiB between servers", "planned"]
    cells = []
    for row in rows:
        named = [row["device"], row["layout"], row["form"]]
        if "error" in row:
            cells.append([*named, "", "", "", row["error"]])
            continue
        sent = [row[source][side] for side in SIDES for source in ("compiled", "planned")]
        cells.append([*named, *(f"{size / 1024:,.0f}" for size in sent)])
    return _table(head, cells)
