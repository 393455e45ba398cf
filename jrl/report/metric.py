"""The rows of the table of metrics."""

from dataclasses import dataclass

SPREAD = {"mean": "Mean", "min": "Smallest", "max": "Largest"}


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
      name: verl's spelling, or ours where verl has none; ``family/*`` for a family.
      unit: "nats", "tokens", "fraction", "seconds", ...
      definition: one sentence, with the denominator where there is one.
    """

    name: str
    unit: str
    definition: str


def read_table(text: str) -> tuple[Metric, ...]:
    """The metrics of a table with a row for each: ``name | unit | definition``.

    A row goes on in lines that begin with two spaces; lines that begin with ``#`` are comments. A
    name that ends in ``{mean,min,max}`` is three metrics of a quantity, which its definition names.
    """
    rows = text.replace("\n  ", " ").splitlines()
    given = (row.split(" | ", 2) for row in rows if row and not row.startswith("#"))
    return tuple(metric for row in given for metric in _of_row(*row))


def _of_row(name: str, unit: str, definition: str) -> list[Metric]:
    start, spread, _ = name.partition("{mean,min,max}")
    if not spread:
        return [Metric(name, unit, definition)]
    return [Metric(start + part, unit, f"{word} {definition}") for part, word in SPREAD.items()]
