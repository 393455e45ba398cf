"""The parts of the table, whether kernels are right first and then in the order of what is
promised: time may end before they do."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.gpu import (
    attention,
    cached,
    cases,
    ceilings,
    decoding,
    dispatch,
    grouped,
    grpo,
    head,
    layer,
    torch_grouped,
    training,
)
from benchmarks.gpu.rows import Part, Row, Settings


class Listed(NamedTuple):
    """A part.

    Attributes:
      rows: of it.
      seconds: that one of them may take.
      asked: whether it is run only where it is named.
    """

    rows: Part
    seconds: float = 60.0
    asked: bool = False


CEILINGS, TORCH = "ceilings", "torch"
PARTS = {
    CEILINGS: Listed(ceilings.rows),
    "cases": Listed(cases.rows, seconds=30),
    "grouped": Listed(grouped.rows, seconds=30),
    TORCH: Listed(torch_grouped.rows, seconds=30),
    "dispatch": Listed(dispatch.rows, seconds=30),
    "layer": Listed(layer.rows),
    "step": Listed(training.rows, seconds=100),
    "decode": Listed(decoding.rows, seconds=90),
    "grpo": Listed(grpo.rows, seconds=150),
    "cached": Listed(cached.rows, seconds=30),
    "attention": Listed(attention.rows, seconds=30),
    "head": Listed(head.rows, seconds=30),
    "uneven": Listed(grouped.uneven, seconds=30),
    "tilings": Listed(grouped.tilings, seconds=30, asked=True),
}


def rows_of(part: str, settings: Settings) -> Iterator[Row]:
    """The rows of a part that are selected; all of the ceilings."""
    only = () if part == CEILINGS else settings.only
    for row in PARTS[part].rows(settings):
        if not only or any(name in f"{row.name} {row.form}" for name in only):
            yield row


def chosen(names: list[str] | None) -> list[str]:
    """The parts that are run: of those named, or of all that need not be; ceilings always."""
    if names is None:
        return [name for name, part in PARTS.items() if not part.asked]
    return [name for name in PARTS if name == CEILINGS or name in names]
