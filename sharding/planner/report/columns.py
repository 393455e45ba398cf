"""Plain text in columns."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
