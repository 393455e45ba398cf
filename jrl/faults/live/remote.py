"""Watcher of machines over the network, through Prometheus or their exporters' pages."""

import time
from collections.abc import Callable, Collection

import numpy as np

from jrl.faults.collect.align import Process
from jrl.faults.collect.exporters import build_fleet, describe_ignored
from jrl.faults.collect.fleet import Detector, Fleet
from jrl.faults.collect.prometheus import SampleSource, Store
from jrl.faults.live.watcher import AlarmTracker, DetectionPass


class RemoteWatcher:
    """Compares the machines of a source; as `Watcher`, without files.

    Args:
      source: source of the samples.
      detector: names the outlier machines.
      seconds: length of the compared record.
      silence: a machine without a sample for so many seconds is called silent.
      label: names the machine, see `build_fleet`.
      requested: names of exporters that are compared although they are unknown.
      acknowledged: see `AlarmTracker`.
    """

    def __init__(
        self,
        source: SampleSource,
        detector: Detector,
        *,
        seconds: float | int = 900.0,
        silence: float | int = 60.0,
        label: str | None = None,
        requested: Collection[str] = (),
        acknowledged: Callable[[], Collection[str]] | None = None,
    ):
        self._store = Store(source, seconds)
        self._tracker = AlarmTracker(detector, acknowledged)
        self._seconds, self._silence, self._label = seconds, silence, label
        self._requested = requested

    def detect(self, now: float | None = None) -> DetectionPass:
        """Polls for new samples and compares; `now` is Unix time, the present by default."""
        started = time.monotonic()
        now = time.time() if now is None else now
        series, problems = self._store.update(now)
        fleet = build_fleet(series, label=self._label, requested=self._requested)
        report, raised = self._tracker.update(fleet)
        processes = tuple(
            self._process_state(fleet, row, now) for row in range(len(fleet.machines))
        )
        health = (
            f"{len(series)} series of {len(fleet.machines)} machines every {fleet.period:g} s, "
            f"asked in {time.monotonic() - started:.2f} s"
        )
        notes = (*describe_ignored(series, self._requested), *report.notes)
        if not series:
            notes = (
                f"no sample of the last {self._seconds:g} s was received: no machine is watched",
            )
        return DetectionPass(
            fleet,
            processes,
            tuple(report.alarms),
            raised,
            tuple(problems),
            notes,
            report.comparable,
            health,
        )

    def _process_state(self, fleet: Fleet, row: int, now: float) -> Process:
        seen = np.flatnonzero(np.isfinite(fleet.values[row]).any(axis=0))
        age = now - float(fleet.times[seen[-1]]) if seen.size else float("nan")
        late = not age <= max(self._silence, 3 * fleet.period)
        state = "silent" if late else "running"
        return Process(fleet.machines[row], "", state, age, damaged=0, torn=0, future=0)
