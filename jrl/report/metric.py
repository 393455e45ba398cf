"""The lines of the table of metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    Attributes:
      name: verl's spelling, or ours where verl has none; ``family/*`` for a family.
      definition: one sentence, with the denominator where there is one.
      unit: "nats", "tokens", "fraction", "seconds", ...
    """

    name: str
    definition: str
    unit: str


def spread(name: str, what: str, unit: str) -> list[Metric]:
    """Return the mean, the smallest and the largest of one quantity as three metrics."""
    words = {"mean": "Mean", "min": "Smallest", "max": "Largest"}
    return [Metric(f"{name}/{part}", f"{word} {what}.", unit) for part, word in words.items()]
