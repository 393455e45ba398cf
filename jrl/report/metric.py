"""The lines of the table of metrics."""

from collections.abc import Mapping
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


def spread(name: str, what: str, unit: str, trl: Mapping[str, str] | None = None) -> list[Metric]:
    """Return the mean, the smallest and the largest of one quantity as three metrics."""
    words = {"mean": "Mean", "min": "Smallest", "max": "Largest"}
    trl = trl or {}
    return [
        Metric(f"{name}/{part}", f"{word} {what}.", unit, trl.get(part))
        for part, word in words.items()
    ]
