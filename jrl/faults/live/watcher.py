"""Periodic detection on the records of running processes; reports new alarms."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jrl.faults.collect.align import Aligned, Process, align
from jrl.faults.collect.fleet import Alarm, Detector, Fleet, Report
from jrl.faults.collect.record import Follower
from jrl.faults.standard import SILENCE

MIN_MACHINES = 3
"""Minimum for a comparison: of two machines that differ, either may be the faulty one."""


@dataclass(frozen=True)
class DetectionPass:
    """Result of one detection pass over the records.

    Attributes:
      fleet: the machines with samples; of `Watcher` only the running ones, from the time when all
        of them have samples.
      processes: state of all machines.
      alarms: the current ones.
      raised: those of machines that had no alarm in the previous pass.
      unreadable: one line for each file or address that cannot be read.
      notes: what could not be compared and why, one line each.
      comparable: true if anything was compared; see `is_comparable` for a detector without
        `examine`.
      health: cost and coverage of the pass itself, in words.
    """

    fleet: Fleet
    processes: tuple[Process, ...]
    alarms: tuple[Alarm, ...]
    raised: tuple[Alarm, ...]
    unreadable: tuple[str, ...]
    notes: tuple[str, ...] = ()
    comparable: bool = True
    health: str = ""

    @property
    def ended(self) -> bool:
        """True if there are processes and all of them have ended cleanly."""
        return bool(self.processes) and all(each.state == "ended" for each in self.processes)

    @property
    def has_samples(self) -> bool:
        """True if any process has a sample."""
        return has_samples(self.processes)


class AlarmTracker:
    """Runs a detector at each pass, and tracks which machines are newly alarmed.

    Args:
      detector: names the outlier machines; one with `examine` also lists what it cannot compare.
      acknowledged: known faulty machines, read at each pass. They are left out of the comparison,
        so that another can be named, and raise no alarm.
    """

    def __init__(
        self, detector: Detector, acknowledged: Callable[[], Collection[str]] | None = None
    ):
        self._detector = detector
        self._acknowledged: Callable[[], Collection[str]] = acknowledged or tuple
        self._alarmed: set[str] = set()

    def update(
        self, fleet: Fleet, others: Sequence[Alarm] = ()
    ) -> tuple[Report, tuple[Alarm, ...]]:
        """The report on a fleet, with the alarms of `others` at its end, and the alarms of machines
        that had none at the last call."""
        acknowledged = set(self._acknowledged())
        compared = drop_machines(fleet, acknowledged)
        examine = getattr(self._detector, "examine", None)
        if examine is None:
            report = Report(
                self._detector(compared), comparable=is_comparable(self._detector, compared)
            )
        else:
            report = examine(compared)
        alarms = [*report.alarms, *(each for each in others if each.machine not in acknowledged)]
        raised = tuple(alarm for alarm in alarms if alarm.machine not in self._alarmed)
        self._alarmed = {alarm.machine for alarm in alarms}
        return replace(report, alarms=alarms), raised


class Watcher:
    """Compares the processes that write into some folders.

    Args:
      folders: folders of records by name: machine M of folder N is called N/M. A single folder may
        have an empty name.
      detector: names the outlier machines.
      seconds: length of the compared record.
      silence: a process without a sample for so many seconds is no longer compared.
      silence_timeout: after so many it raises an alarm, if it had samples after the youngest
        running process started; None never.
      acknowledged: see `AlarmTracker`.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        detector: Detector,
        *,
        seconds: float | int = 900.0,
        silence: float | int = 10.0,
        silence_timeout: float | int | None = 60.0,
        acknowledged: Callable[[], Collection[str]] | None = None,
    ):
        # Twice the ticks: a clock that was set back writes some seconds twice.
        rows = 2 * math.ceil(seconds)
        self._followers = {name: Follower(folder, rows) for name, folder in folders.items()}
        self._tracker = AlarmTracker(detector, acknowledged)
        self._seconds, self._silence, self._timeout = seconds, silence, silence_timeout
        paths = ", ".join(str(folder) for folder in folders.values())
        self._no_sample_note = (
            f"no sample yet in {paths}: a run started with --faults writes one a second"
        )

    def detect(self, now: float | None = None) -> DetectionPass:
        """Reads new samples and compares; `now` is Unix time, the present by default."""
        started = time.monotonic()
        now = time.time() if now is None else now
        records, unreadable = [], []
        for name, follower in self._followers.items():
            folder_records, errors = follower.read()
            prefix = f"{name}/" if name else ""
            records += [replace(each, machine=prefix + each.machine) for each in folder_records]
            unreadable += errors
        aligned = align(records, now=now, seconds=self._seconds, silence=self._silence)
        fleet = trim_to_common_start(aligned.fleet)
        report, raised = self._tracker.update(fleet, self._silent(aligned, records, now))
        read = sum(follower.bytes_read for follower in self._followers.values())
        health = (
            f"{len(fleet.machines)} of {len(aligned.processes)} processes are running, read "
            f"{read / 1024:.0f} KiB in {time.monotonic() - started:.2f} s"
        )
        return DetectionPass(
            fleet,
            aligned.processes,
            tuple(report.alarms),
            raised,
            tuple(unreadable),
            report.notes if has_samples(aligned.processes) else (self._no_sample_note,),
            report.comparable,
            health,
        )

    def _silent(self, aligned: Aligned, records: Sequence, now: float) -> list[Alarm]:
        """Alarms for processes that ran together with the present ones and stopped uncleanly."""
        running = set(aligned.fleet.machines)
        start_times = [record.begun for record in records if record.machine in running]
        if self._timeout is None or not start_times:
            return []
        return [
            Alarm(each.machine, SILENCE, now - each.age, now, {"seconds": float(each.age)})
            for each in aligned.processes
            if each.state == "silent"
            and each.age >= self._timeout
            and now - each.age > max(start_times)
        ]


def check_models(models: str | None, detector: str) -> None:
    """Raises a ValueError for a file of models without the detector that uses them."""
    if models is not None and detector != "minder":
        raise ValueError(f"models={models!r} needs --detector minder: give it, or leave it out.")


def has_samples(processes: Sequence[Process]) -> bool:
    """True if any process has a sample."""
    return not all(math.isnan(each.age) for each in processes)


def is_comparable(detector: Detector, fleet: Fleet) -> bool:
    """True if a detector without `examine` compares a fleet: as its `compares` says, or without it
    if there are `MIN_MACHINES`."""
    compares = getattr(detector, "compares", None)
    return len(fleet.machines) >= MIN_MACHINES if compares is None else compares(fleet)


def drop_machines(fleet: Fleet, machines: Collection[str]) -> Fleet:
    """The fleet without these machines."""
    rows = [row for row, name in enumerate(fleet.machines) if name not in machines]
    names = tuple(fleet.machines[row] for row in rows)
    return replace(fleet, machines=names, values=fleet.values[rows])


def trim_to_common_start(fleet: Fleet) -> Fleet:
    """The fleet from the time on at which every machine has had a sample.

    Machines without any do not count.
    """
    has_sample = np.isfinite(fleet.values).sum(axis=1) > 0
    first_samples = [int(np.flatnonzero(row)[0]) for row in has_sample if row.any()]
    return fleet.last((fleet.num_samples - max(first_samples, default=0)) * fleet.period)
