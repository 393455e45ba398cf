"""The rows of the table of metrics."""

from dataclasses import dataclass

SPREAD = {"mean": "Mean", "min": "Smallest", "max": "Largest"}


@dataclass(frozen=True)
class MetricDefinition:
    """One row of the table.

    Attributes:
      name: verl's spelling, or ours where verl has none; ``family/*`` for a family.
      unit: "nats", "tokens", "fraction", "seconds", ...
      definition: one sentence, with the denominator where there is one.
    """

    name: str
    unit: str
    definition: str


def read_table(text: str) -> tuple[MetricDefinition, ...]:
    """The metrics of a table with a row for each: ``name | unit | definition``.

    A row goes on in lines that begin with two spaces; lines that begin with ``#`` are comments. A
    name that ends in ``{mean,min,max}`` is three metrics of a quantity, which its definition names.
    """
    lines = text.replace("\n  ", " ").splitlines()
    rows = (row.split(" | ", 2) for row in lines if row and not row.startswith("#"))
    return tuple(metric for row in rows for metric in _expand_row(*row))


def _expand_row(name: str, unit: str, definition: str) -> list[MetricDefinition]:
    start, spread, _ = name.partition("{mean,min,max}")
    if not spread:
        return [MetricDefinition(name, unit, definition)]
    return [
        MetricDefinition(start + suffix, unit, f"{word} {definition}")
        for suffix, word in SPREAD.items()
    ]
