"""Command line: prints published measurements beside predictions, and errors by model."""

import argparse
from collections.abc import Iterable

from benchmarks.planner.evidence import EVIDENCE, Evidence
from benchmarks.planner.predicted import Accuracy, Row, accuracy_of, predict
from moe.planner.report import align_columns


def evidence_table() -> str:
    """All rows with their settings, by source."""
    lines = []
    for source in dict.fromkeys(row.source for row in EVIDENCE):
        cells = [("model", "hardware", "settings", "measured", "predicted", "ratio")]
        cells += [_cells(row) for row in EVIDENCE if row.source == source]
        lines += [source, align_columns(cells), ""]
    return "\n".join(lines).rstrip()


def _cells(row: Evidence) -> tuple[str, ...]:
    settings = f"{row.layout}, {row.rows} x {row.time}"
    if row.micro_rows is not None:
        settings += f", micro {row.micro_rows}" + (f", {row.remat}" if row.remat else "")
    for name, is_on in (
        ("experts again", row.repeats_experts),
        ("FSDP", row.fsdp),
        ("all-to-all overlapped", row.overlaps_experts),
        ("graphs", row.graphs),
    ):
        settings += f", {name}" if is_on else ""
    predicted, measured = predict(row), row.tokens_per_second
    if predicted is None:
        return row.model, row.hardware, settings, f"{measured:,.0f}", "does not fit", ""
    ratio = f"{predicted / measured:.2f}" + (" (fitted)" if row.fitted else "")
    return row.model, row.hardware, settings, f"{measured:,.0f}", f"{predicted:,.0f}", ratio


def accuracy_by_model() -> dict[str, Accuracy]:
    """Accuracy on the rows of each model, and on all."""
    names = dict.fromkeys(row.model for row in EVIDENCE)
    by_model = {name: accuracy_of(_pairs(r for r in EVIDENCE if r.model == name)) for name in names}
    return by_model | {"all": accuracy_of(_pairs(EVIDENCE))}


def _pairs(rows: Iterable[Evidence]) -> list[Row]:
    return [
        (
            *(row.tokens_per_second, predicted, row.fitted),
            (row.model, row.hardware, row.num_devices, row.time),
        )
        for row in rows
        if (predicted := predict(row)) is not None
    ]


def accuracy_table() -> str:
    """Errors and rank correlations by model."""
    head = "model", "rows", "held out", "median error", "worst", "ranks", "same cluster", "verdict"
    cells: list[tuple[str, ...]] = [head]
    for name, accuracy in accuracy_by_model().items():
        number, held_out = accuracy.rows
        errors = [_as_text(error, ".0%") for error in (accuracy.median, accuracy.worst)]
        ranks = [_as_text(each, ".2f") for each in (accuracy.correlation, accuracy.on_cluster)]
        verdict = accuracy.verdict if name != "all" else ""
        cells.append((name, str(number), str(held_out), *errors, *ranks, verdict))
    return align_columns(cells)


def _as_text(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def main() -> None:
    """Prints the tables."""
    prog = "python -m benchmarks.planner.validation"
    argparse.ArgumentParser(prog=prog, description=__doc__).parse_args()
    print(evidence_table(), accuracy_table(), sep="\n\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
