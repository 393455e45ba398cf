"""One line of the table of metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    Attributes:
      name: verl's spelling, or ours where verl has none; ``family/*`` for a family.
      definition: one sentence, with the denominator where there is one.
      unit: "nats", "tokens", "fraction", "seconds", ...
      trl: what TRL calls the same quantity, or None.
    """

    name: str
    definition: str
    unit: str
    trl: str | None = None
