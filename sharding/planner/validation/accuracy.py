"""Accuracy of the planner: errors of its predictions and rank correlations of models."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MEDIAN, WORST, RANKS = 0.15, 0.40, 0.8
"""Goals: median and largest relative error of rows that nothing was fitted to, and least rank
correlation of the rows of a model."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on the rows of a model.

    Attributes:
      rows: number of rows, and of those that nothing was fitted to.
      median, worst: relative errors of the latter; None without any.
      correlation: Spearman's rank correlation of all; None with fewer than three.
    """

    rows: tuple[int, int]
    median: float | None
    worst: float | None
    correlation: float | None

    @property
    def verdict(self) -> str:
        """Judgement in words."""
        if self.median is None or self.worst is None or self.correlation is None:
            return "too few rows"
        is_close = self.median < MEDIAN and self.worst < WORST
        if self.correlation <= RANKS:
            return "do not rank these"
        return "holds" if is_close else "ranks hold, speeds do not"


def accuracy_of(rows: Sequence[tuple[float, float, bool]]) -> Accuracy:
    """Accuracy on rows of (measured, predicted, used for fitting)."""
    errors = [abs(found / measured - 1) for measured, found, fitted in rows if not fitted]
    measured, found = [row[0] for row in rows], [row[1] for row in rows]
    return Accuracy(
        (len(rows), len(errors)),
        statistics.median(errors) if errors else None,
        max(errors) if errors else None,
        rank_correlation(measured, found) if len(rows) > 2 else None,
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
