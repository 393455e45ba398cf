"""Accuracy of the planner: errors of its predictions and rank correlations of models."""

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MEDIAN, WORST, RANKS = 0.15, 0.40, 0.8
"""Goals: median and largest relative error of rows that nothing was fitted to, and least rank
correlation of the rows of a model."""
Row = tuple[float, float, bool, Hashable]
"""Measured and predicted speed, true if used for fitting, and the cluster with its task."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on the rows of a model.

    Attributes:
      rows: number of rows, and of those that nothing was fitted to.
      median, worst: relative errors of the latter; None without any.
      correlation: Spearman's rank correlation of all; None with fewer than three.
      on_cluster: mean of the correlations of rows on equal clusters, weighted by their number: of
        layouts that a user would choose from. None without three such rows.
    """

    rows: tuple[int, int]
    median: float | None
    worst: float | None
    correlation: float | None
    on_cluster: float | None

    @property
    def verdict(self) -> str:
        """Judgement in words."""
        if self.median is None or self.worst is None or self.correlation is None:
            return "too few rows"
        is_close = self.median < MEDIAN and self.worst < WORST
        if min(self.correlation, 1.0 if self.on_cluster is None else self.on_cluster) <= RANKS:
            return "do not rank these"
        return "holds" if is_close else "ranks hold, speeds do not"


def accuracy_of(rows: Sequence[Row]) -> Accuracy:
    errors = [
        abs(predicted / measured - 1) for measured, predicted, fitted, _ in rows if not fitted
    ]
    clusters: dict[Hashable, list[Row]] = {}
    for row in rows:
        clusters.setdefault(row[3], []).append(row)
    comparable = [group for group in clusters.values() if len(group) > 2]
    number = sum(map(len, comparable))
    return Accuracy(
        (len(rows), len(errors)),
        statistics.median(errors) if errors else None,
        max(errors) if errors else None,
        _correlation(rows) if len(rows) > 2 else None,
        sum(len(group) * _correlation(group) for group in comparable) / number
        if comparable
        else None,
    )


def _correlation(rows: Sequence[Row]) -> float:
    return rank_correlation([row[0] for row in rows], [row[1] for row in rows])


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
