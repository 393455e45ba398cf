"""Outlier detector without training: ratio of a machine's metric to the others', and its duration.

It needs at least three machines, and samples of little more than `continuity` seconds. It detects
what is off by a factor; `ShiftDetector` and Minder detect smaller deviations.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from jrl.faults.collect.fleet import Alarm, Fleet, Report
from jrl.faults.collect.vocabulary import STEP_TIME, find_recorded

MAD_TO_STD = 1.4826
"""Standard deviations in a median absolute deviation, for a normal distribution."""


def nan_median(values: np.ndarray, axis: int) -> np.ndarray:
    """The median of the numbers along an axis, NaN if there are none; no warning for that."""
    return sorted_median(np.moveaxis(np.sort(values, axis=axis), axis, -1))


def sorted_median(ordered: np.ndarray) -> np.ndarray:
    """`nan_median` of values that are sorted along the last axis, NaN last."""
    size = ordered.shape[-1]
    count = np.isfinite(ordered).sum(axis=-1)
    if size > 0 and (count == size).all():
        return (ordered[..., (size - 1) // 2] + ordered[..., size // 2]) / 2
    below, above = (np.clip(index, 0, size - 1) for index in ((count - 1) // 2, count // 2))
    low, high = (
        np.take_along_axis(ordered, index[..., None], -1)[..., 0] for index in (below, above)
    )
    return np.where(count > 0, (low + high) / 2, np.nan)


def stretches(labels: np.ndarray) -> list[tuple[int, int]]:
    """Start and end index (exclusive) of each run of equal entries."""
    edges = np.flatnonzero(np.diff(labels)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), len(labels)], strict=True))


@dataclass(frozen=True)
class OutlierDetector:
    """Names the machine whose metric is a multiple or a fraction of the others' for long enough.

    With ``e = log(median of a metric over the last `window` seconds)``, the score of a machine is
    ``|e - m| / max(1.4826 median |e - m|, resolution)``, ``m`` the median of ``e`` over all
    machines. The machine with the largest score is a candidate if it reaches `threshold`; it is
    named if it alone stays the candidate for `continuity` seconds. Metrics are searched in their
    order, and the first that names a machine ends the search, as in Minder (NSDI 2025, section
    4.4).

    Attributes:
      metrics: positive quantities, by any name of `jrl.faults.collect.vocabulary`; those that
        were not recorded are passed over.
      window: seconds of a window. A gap that is longer leaves a machine out of the comparison.
      continuity: seconds for which a machine has to stay candidate; the paper's is 240.
      threshold: in spreads. Four times the resolution is a factor of 2.2.
      resolution: lower bound of the logarithm's spread among healthy machines, so that tiny
        differences between identical machines do not count.

    Raises:
      ValueError: for a setting that is not a finite number above 0.
    """

    metrics: tuple[str, ...] = (STEP_TIME, "cpu/process")
    window: float | int = 8.0
    continuity: float | int = 240.0
    threshold: float | int = 4.0
    resolution: float | int = 0.2

    def __post_init__(self):
        for name in ("window", "continuity", "threshold", "resolution"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a finite number above 0.")

    def __call__(self, fleet: Fleet) -> list[Alarm]:
        """Alarms of the first metric that names a machine, one per machine, the greatest score
        first."""
        for metric in find_recorded(self.metrics, fleet.metrics):
            alarms = self._alarms(fleet, metric)
            if alarms:
                return alarms
        return []

    def examine(self, fleet: Fleet) -> Report:
        """Report with the alarms, and whether the fleet can be compared."""
        return Report(self(fleet), comparable=self.compares(fleet))

    def compares(self, fleet: Fleet) -> bool:
        """True if at least three machines have a metric, and the record is long enough for an
        alarm: its windows begin in `continuity` seconds."""
        num_windows = fleet.num_samples - self._width(fleet.period) + 1
        long_enough = num_windows * fleet.period >= self.continuity
        columns = [fleet.metrics.index(name) for name in find_recorded(self.metrics, fleet.metrics)]
        num_machines = np.isfinite(fleet.values[:, columns]).any(axis=2).sum(axis=0)
        return long_enough and bool((num_machines >= 3).any())

    def scores(self, values: Float[np.ndarray, "machine time"], period: float | int) -> np.ndarray:
        """``[machine, window]`` scores of one metric; NaN if a machine cannot be compared.

        Fewer than three machines cannot be compared: of two that differ, either may
        be the faulty one.
        """
        width = self._width(period)
        if values.shape[0] < 3 or values.shape[1] < width:
            return np.full((values.shape[0], max(0, values.shape[1] - width + 1)), np.nan)
        middle = nan_median(np.lib.stride_tricks.sliding_window_view(values, width, axis=1), 2)
        typical = nan_median(middle, 0)
        # Values are clipped at a thousandth of the typical one; if that is 0, all are equal.
        positive = np.where(typical > 0, typical, np.nan)
        logs = np.log(np.maximum(middle, 1e-3 * positive))
        deviation = np.abs(logs - nan_median(logs, 0))
        spread = np.maximum(MAD_TO_STD * nan_median(deviation, 0), self.resolution)
        enough = np.isfinite(logs).sum(axis=0) >= 3
        return np.where(enough, deviation / spread, np.nan)

    def _width(self, period: float | int) -> int:
        """Samples of a window."""
        return max(1, round(self.window / period))

    def _alarms(self, fleet: Fleet, metric: str) -> list[Alarm]:
        values = fleet.values[:, fleet.metrics.index(metric)].astype(np.float64)
        scores = self.scores(values, fleet.period)
        finite_scores = np.where(np.isfinite(scores), scores, 0.0)
        if finite_scores.size == 0:
            return []
        first = finite_scores.argmax(axis=0)
        candidate = np.where(finite_scores.max(axis=0) >= self.threshold, first, -1)
        alarms: dict[int, Alarm] = {}  # of a machine with two deviations, the later one
        width = self._width(fleet.period)
        for begin, end in stretches(candidate):
            machine, seconds = int(candidate[begin]), (end - begin) * fleet.period
            if machine < 0 or seconds < self.continuity:
                continue
            evidence = {
                "score": float(np.median(finite_scores[machine, begin:end])),
                "threshold": float(self.threshold),
                "scores": scores[machine],
            }
            since, until = (
                fleet.start + (index + width - 1) * fleet.period for index in (begin, end)
            )
            alarms[machine] = Alarm(fleet.machines[machine], metric, since, until, evidence)
        return sorted(alarms.values(), key=lambda alarm: -float(alarm.evidence["score"]))
