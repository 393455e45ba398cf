"""Default detector: error counters, silence, outlier step times and shifts in any metric."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jrl.faults.collect.error_codes import CAUSES
from jrl.faults.collect.fleet import Alarm, Fleet, Report
from jrl.faults.collect.vocabulary import STEP_TIME
from jrl.faults.counters import blank_notes, error_rates, moved_counters, other_codes
from jrl.faults.outlier import OutlierDetector
from jrl.faults.shift import ShiftDetector
from jrl.faults.silence import SilenceDetector

MIN_SHIFT_CONTINUITY = 240.0
"""Lower bound of the seconds for which a subtle shift must last; other alarms may need less."""


@dataclass(frozen=True)
class StandardDetector:
    """Four questions, the most certain answer first; a machine is named once.

    1. Has a counter of fatal errors moved? (`moved_counters`)
    2. Has a machine, or one of its metrics, fallen silent? (`SilenceDetector`)
    3. Is a training step a multiple of the others'? (`OutlierDetector`)
    4. Has a machine shifted away from the others in any metric? (`ShiftDetector`)

    Attributes:
      continuity: seconds for which a machine has to be an outlier; at least 240 for the fourth.
      threshold: of the fourth, in spreads.
      silence: seconds without a sample.
      window: seconds of a window of the third.
      metrics: what is compared, by any name of `jrl.faults.collect.vocabulary`; all by default.
      codes: causes, a subset of `CAUSES`, for which an error code names its machine in the first
        question. The others are reported in the notes.
    """

    continuity: float | int = 240.0
    threshold: float | int = ShiftDetector.threshold
    silence: float | int = 240.0
    window: float | int = 8.0
    metrics: Sequence[str] = ()
    codes: Sequence[str] = ("machine",)

    def __post_init__(self):
        self._detectors()
        unknown = [cause for cause in self.codes if cause not in CAUSES]
        if unknown:
            raise ValueError(f"codes={unknown[0]!r} must be some of {', '.join(CAUSES)}.")

    def _detectors(self) -> tuple[SilenceDetector, OutlierDetector, ShiftDetector]:
        times = tuple(self.metrics) or (STEP_TIME,)
        return (
            SilenceDetector(self.silence),
            OutlierDetector(times, self.window, self.continuity),
            ShiftDetector(
                self.threshold, max(self.continuity, MIN_SHIFT_CONTINUITY), metrics=self.metrics
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
