"""Default detector: error counters, silence, outlier step times and shifts in any metric."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from jrl.faults.collect.fleet import Alarm, Fleet, Report
from jrl.faults.collect.vocabulary import (
    CAUSES,
    SLOWDOWN,
    STEP_TIME,
    ErrorCode,
    error_code,
    gpu_of,
    is_code,
    is_error_rate,
    is_fatal,
)
from jrl.faults.outlier import OutlierDetector
from jrl.faults.remote.series import mask_dips
from jrl.faults.shift import ShiftDetector

SILENCE = "silence"
"""The metric of an alarm about a machine that has stopped giving samples."""
MIN_SHIFT_CONTINUITY = 240.0
"""Lower bound of the seconds for which a subtle shift must last; other alarms may need less."""
MAX_NAMED = 4
"""Maximum number of machines that a note lists by name; otherwise it gives their number."""


@dataclass(frozen=True)
class StandardDetector:
    """Combination of four checks, the most certain first; a machine is named once.

    1. A counter of fatal errors has increased (`moved_counters`).
    2. A machine, or one of its metrics, is silent (`SilenceDetector`).
    3. A training step, or the slowdown of a process, is a multiple of the others'
       (`OutlierDetector`).
    4. A machine has shifted away from the others in any metric (`ShiftDetector`).

    Attributes:
      continuity: seconds for which a machine has to be an outlier; at least 240 for the fourth
        check.
      threshold: of the fourth check, in spreads.
      silence: seconds after the last sample.
      window: seconds of a window of the third check.
      metrics: metrics to compare, by any name of `jrl.faults.collect.vocabulary`; all by default.
      past: see `ShiftDetector`; more than twice a slowdown of 150 s that recovers, so that it is
        less than half of the time before.
      codes: causes, a subset of `CAUSES`, for which an error code names its machine in the first
        check. The others are reported in the notes.
    """

    continuity: float | int = 240.0
    threshold: float | int = ShiftDetector.threshold
    silence: float | int = 240.0
    window: float | int = 8.0
    metrics: Sequence[str] = ()
    codes: Sequence[str] = ("machine",)
    past: float | int = 360.0

    def __post_init__(self):
        self._detectors()
        unknown = [cause for cause in self.codes if cause not in CAUSES]
        if unknown:
            raise ValueError(f"codes={unknown[0]!r} must be some of {', '.join(CAUSES)}.")

    def _detectors(self) -> "tuple[SilenceDetector, OutlierDetector, ShiftDetector]":
        times = tuple(self.metrics) or (STEP_TIME, SLOWDOWN)
        return (
            SilenceDetector(self.silence),
            OutlierDetector(times, self.window, self.continuity),
            ShiftDetector(
                self.threshold,
                max(self.continuity, MIN_SHIFT_CONTINUITY),
                past=self.past,
                metrics=self.metrics,
            ),
        )

    def __call__(self, fleet: Fleet) -> list[Alarm]:
        """Alarms, the most certain first."""
        return self.examine(fleet).alarms

    def examine(self, fleet: Fleet) -> Report:
        """Report with the alarms, the scores and what could not be compared."""
        silent, outlier, shift = self._detectors()
        report = shift.examine(fleet)
        alarm_by_machine: dict[str, Alarm] = {}
        moved = moved_counters(fleet, self.codes)
        for alarm in (*moved, *silent(fleet), *outlier(fleet), *report.alarms):
            alarm_by_machine.setdefault(alarm.machine, alarm)
        alarms = [
            replace(alarm, evidence={**alarm.evidence, **error_rates(fleet, alarm.machine)})
            for alarm in alarm_by_machine.values()
        ]
        comparable = bool(alarms) or report.comparable or outlier.compares(fleet)
        notes = (*report.notes, *other_codes(fleet, self.codes), *blank_notes(fleet))
        return replace(report, alarms=alarms, comparable=comparable, notes=notes)


@dataclass(frozen=True)
class SilenceDetector:
    """Names machines that had no sample for `seconds` in which at least half of the others had
    some.

    A metric that a machine reported before and no longer reports, while the others do, is named as
    well: a GPU that fell off its bus leaves its exporter no series. A metric that has no
    sample yet is not silent, unless it never gets any; nor is a metric whose exporter reports that
    it has no value (`Fleet.blank`), while it has values of another metric of that GPU.

    Attributes:
      seconds: time after the last sample.
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


def moved_counters(fleet: Fleet, causes: Collection[str] = ("machine",)) -> list[Alarm]:
    """Alarms for machines on which a counter of fatal errors increased or an error code changed.

    Examples are uncorrectable ECC errors, XIDs and links that went down. The alarms are raised
    immediately; no machines are compared. If a metric changed on more than half of the machines,
    one of them made the others fail, and only the first is named. An error code names its machine
    if its cause is one of `causes`; `other_codes` lists the rest.
    """
    alarms: list[Alarm] = []
    for column, metric in enumerate(fleet.metrics):
        if not is_fatal(metric):
            continue
        increased: list[Alarm] = []
        for row in range(len(fleet.machines)):
            increased += islice(_alarms(fleet, row, column, causes), 1)
        increased.sort(key=lambda alarm: alarm.start)
        alarms += increased[:1] if 2 * len(increased) > len(fleet.machines) else increased
    return sorted(alarms, key=lambda alarm: alarm.start)


def other_codes(fleet: Fleet, causes: Collection[str] = ("machine",)) -> list[str]:
    """Lines of text, one for each error code that occurred and names no machine."""
    machines_by_code: defaultdict[ErrorCode, list[str]] = defaultdict(list)
    for column, metric in enumerate(fleet.metrics):
        if is_code(metric):
            for row, machine in enumerate(fleet.machines):
                for index, _ in _moves(fleet, row, column):
                    code = error_code(fleet.values[row, column, index])
                    if not _names_machine(code, causes) and machine not in machines_by_code[code]:
                        machines_by_code[code].append(machine)
    return [
        f"{code.describe()} on {_list_machines(machines)}: no machine is named for it."
        for code, machines in machines_by_code.items()
    ]


def _alarms(fleet: Fleet, row: int, column: int, causes: Collection[str]) -> Iterator[Alarm]:
    """Alarms of one machine, one for each increase of a counter or change of an error code."""
    machine, metric = fleet.machines[row], fleet.metrics[column]
    for index, last in _moves(fleet, row, column):
        before, after = (float(fleet.values[row, column, each]) for each in (last, index))
        time = fleet.start + index * fleet.period
        if is_code(metric):
            code = error_code(after)
            if _names_machine(code, causes):
                evidence: dict[str, np.ndarray | float | int] = {"code before": before}
                yield Alarm(machine, metric, time, fleet.end, evidence, cause=code.describe())
        elif after > before:
            yield Alarm(machine, metric, time, fleet.end, {"before": before, "after": after})


def _moves(fleet: Fleet, row: int, column: int) -> Iterator[tuple[int, int]]:
    """Indices of each sample that is positive and differs from its predecessor, and of that one.

    A counter that reads less for a sample or two and returns has not moved.
    """
    values = fleet.values[row, column]
    dips = mask_dips(values, zeros_only=is_code(fleet.metrics[column]))
    finite = np.flatnonzero(np.isfinite(values) & ~dips)
    # A counter that decreases was reset; an error code may be smaller than the last one.
    moved = np.flatnonzero((np.diff(values[finite]) != 0) & (values[finite][1:] > 0))
    for index in moved.tolist():
        yield int(finite[index + 1]), int(finite[index])


def _names_machine(code: ErrorCode, causes: Collection[str]) -> bool:
    return code.cause in causes and not code.handled


def _list_machines(machines: list[str]) -> str:
    if len(machines) <= MAX_NAMED:
        return ", ".join(machines)
    return f"{len(machines)} machines"


def blank_notes(fleet: Fleet) -> list[str]:
    """Lines of text, one for each metric with readings by which exporters report "no value"."""
    machines_by_metric: defaultdict[str, list[str]] = defaultdict(list)
    for machine, metric in sorted(fleet.blank):
        if machine in fleet.machines and metric in fleet.metrics:
            machines_by_metric[metric].append(machine)
    return [
        f"metric {metric!r} of {_list_machines(machines)} has invalid readings: left out."
        for metric, machines in machines_by_metric.items()
    ]


def error_rates(fleet: Fleet, machine: str) -> Mapping[str, float]:
    """Rates of corrected errors and throttling above three times the median over all machines.

    They raise no alarm, as healthy machines correct errors as well, but they help the diagnosis.
    """
    rates = {}
    row = fleet.machines.index(machine)
    for column, metric in enumerate(fleet.metrics):
        if is_error_rate(metric):
            finite = np.isfinite(fleet.values[:, column])
            count = np.maximum(finite.sum(axis=1), 1)
            means = np.where(finite, fleet.values[:, column], 0).sum(axis=1) / count
            if means[row] > 0 and means[row] > 3 * np.median(means):
                rates[metric] = float(means[row])
    return rates
