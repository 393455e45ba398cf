"""Silence detector: names a machine that stops reporting while the others continue."""

from dataclasses import dataclass

import numpy as np

from jrl.faults.collect.fleet import Alarm, Fleet
from jrl.faults.collect.vocabulary import gpu_of

SILENCE = "silence"
"""The metric of an alarm about a machine that has stopped giving samples."""


@dataclass(frozen=True)
class SilenceDetector:
    """Names machines without a sample for `seconds` in which at least half of the others had some.

    A metric that a machine gave before and gives no more, while the others do, is named as well: a
    GPU that fell off its bus leaves its exporter without a series. What a machine did not give yet
    is no silence, unless it never gives anything; nor is a metric of which its exporter says that
    it has no value (`Fleet.blank`), while it has some of another metric of that GPU.

    Attributes:
      seconds: without a sample, in a row.
    """

    seconds: float | int = 240.0

    def __post_init__(self):
        if not (np.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds={self.seconds} must be a finite number above 0.")

    def __call__(self, fleet: Fleet) -> list[Alarm]:
        """Alarms of silent machines, the longest silence first."""
        present = np.isfinite(fleet.values)
        alarms = self._alarms(fleet, np.asarray(present.any(axis=1)), SILENCE)
        silent = {alarm.machine for alarm in alarms}
        for column, metric in enumerate(fleet.metrics):
            for alarm in self._alarms(fleet, present[:, column], metric):
                if alarm.machine not in silent:
                    silent.add(alarm.machine)
                    alarms.append(alarm)
        return sorted(alarms, key=lambda alarm: alarm.start - alarm.end)

    def _alarms(self, fleet: Fleet, present: np.ndarray, metric: str) -> list[Alarm]:
        """The machines that are silent in one metric, or in all."""
        ever = np.asarray(present.any(axis=1))
        if ever.sum() < 2:
            return []
        others = 2 * present[ever].sum(axis=0) >= ever.sum()
        least = max(1, round(self.seconds / fleet.period))
        missing = others & ~present
        alarms = []
        for row in np.flatnonzero(missing.sum(axis=1) >= least):
            if not ever[row] and metric != SILENCE:
                continue  # a metric that this machine does not have
            begin, end = self._longest(present[row], others)
            seconds = int(others[begin:end].sum()) * fleet.period
            if seconds < self.seconds or _reports_no_value(fleet, int(row), metric, begin, end):
                continue
            evidence: dict[str, np.ndarray | float | int] = {"seconds": float(seconds)}
            if metric != SILENCE:
                evidence[SILENCE] = 1
            since, until = (fleet.start + index * fleet.period for index in (begin, end))
            alarms.append(Alarm(fleet.machines[row], metric, since, until, evidence))
        return alarms

    @staticmethod
    def _longest(present: np.ndarray, others: np.ndarray) -> tuple[int, int]:
        """The gap, after the first sample if there is one, in which the others had most."""
        seen = np.flatnonzero(present)
        if seen.size == 0:
            return 0, len(present)
        edges = np.r_[seen, len(present)]
        total = np.r_[0, np.cumsum(others)]
        lost = total[edges[1:]] - total[edges[:-1] + 1]
        longest = int(lost.argmax())
        return int(edges[longest]) + 1, int(edges[longest + 1])


def _reports_no_value(fleet: Fleet, row: int, metric: str, begin: int, end: int) -> bool:
    """True if the exporter reports "no value" for a metric while it has others of the same GPU."""
    if (fleet.machines[row], metric) not in fleet.blank:
        return False
    same_gpu = [gpu_of(name) == gpu_of(metric) for name in fleet.metrics]
    return bool(np.isfinite(fleet.values[row, same_gpu, begin:end]).any())
