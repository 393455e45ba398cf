"""Looking at the records of running processes again and again, and saying what is new."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jrl.faults.collect.align import Aligned, Process, align, read_folder
from jrl.faults.fleet import Alarm, Detector, Fleet

SILENCE = "silence"
"""The metric of an alarm about a process that has stopped giving samples."""


@dataclass(frozen=True)
class Look:
    """What one look at the records showed.

    Attributes:
      fleet: the running machines, from when all of them have samples.
      processes: all machines at a glance.
      alarms: those that hold now.
      raised: those among them that the last look did not have.
      unreadable: one line for each file that cannot be read.
    """

    fleet: Fleet
    processes: tuple[Process, ...]
    alarms: tuple[Alarm, ...]
    raised: tuple[Alarm, ...]
    unreadable: tuple[str, ...]

    @property
    def ended(self) -> bool:
        """Whether there are processes and all have said that they are through."""
        return bool(self.processes) and all(each.state == "ended" for each in self.processes)


class Watcher:
    """Compares the processes that write below some folders.

    Args:
      folders: where records are, by a name that goes before the machines'; a single folder may have
        the empty name.
      detector: names who stands out.
      seconds: how far back to look.
      silence: a process that has given no sample for so many seconds is no longer compared.
      mourning: and after so many it is an alarm, if another one is running; None never.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        detector: Detector,
        *,
        seconds: float | int = 900.0,
        silence: float | int = 10.0,
        mourning: float | int | None = 60.0,
    ):
        self._folders, self._detector = dict(folders), detector
        self._seconds, self._silence, self._mourning = seconds, silence, mourning
        self._known: set[str] = set()

    def look(self, now: float | None = None) -> Look:
        """Reads what there is; `now` is Unix time, the present by default."""
        now = time.time() if now is None else now
        records, unreadable = [], []
        # Twice the ticks: a clock that was set back writes some seconds twice.
        for name, folder in self._folders.items():
            found, errors = read_folder(folder, last=2 * math.ceil(self._seconds))
            prefix = f"{name}/" if name else ""
            records += [replace(each, machine=prefix + each.machine) for each in found]
            unreadable += errors
        aligned = align(records, now=now, seconds=self._seconds, silence=self._silence)
        fleet = all_present(aligned.fleet)
        alarms = [*self._detector(fleet), *self._silent(aligned, records, now)]
        raised = [alarm for alarm in alarms if alarm.machine not in self._known]
        self._known = {alarm.machine for alarm in alarms}
        return Look(fleet, aligned.processes, tuple(alarms), tuple(raised), tuple(unreadable))

    def _silent(self, aligned: Aligned, records: Sequence, now: float) -> list[Alarm]:
        """Processes that ran beside the present ones and stopped without a word."""
        running = set(aligned.fleet.machines)
        begun = [record.begun for record in records if record.machine in running]
        if self._mourning is None or not begun:
            return []
        return [
            Alarm(each.machine, SILENCE, now - each.age, now, {"seconds": float(each.age)})
            for each in aligned.processes
            if each.state == "silent" and each.age >= self._mourning and now - each.age > max(begun)
        ]


def all_present(fleet: Fleet) -> Fleet:
    """The fleet from the moment on at which its last machine has its first sample."""
    some = np.isfinite(fleet.values).sum(axis=1) > 0
    begins = [int(np.flatnonzero(row)[0]) for row in some if row.any()]
    return fleet.last((fleet.num_samples - max(begins, default=0)) * fleet.period)
