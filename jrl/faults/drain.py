"""Drain of a run: an alarm ends it after a checkpoint, for a restart without the faulty machine.

Each drain leaves its evidence in the run folder: ``faults/drain-N.json`` with the alarm, the step
and the restart, and ``faults/drain-N.npz`` with the samples that the detector compared.
"""

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jrl.faults.collect.fleet import Alarm, Fleet
from jrl.runs import records

MAX_BYTES = 2**26
"""Bytes of samples beyond which they are not stored with a drain."""
FOLDER = "faults"
"""Folder of samples and drains in a run folder."""


@dataclass(frozen=True)
class Restart:
    """Restart of a drained run on fewer processes.

    Attributes:
      processes: indices, before the restart, of the processes that continue.
      flags: of the training program, which replace those that it was started with.
      layout: of the devices that are left.
    """

    processes: tuple[int, ...]
    flags: tuple[str, ...]
    layout: str


@dataclass(frozen=True)
class Drain:
    """Record of a drain.

    Attributes:
      number: of the run's drains, from 1.
      time: Unix time, in seconds.
      step: of the checkpoint that the run continues from.
      num_processes: of the run before.
      process: index of the process on the faulty machine.
      alarm: machine, metric, start, end, cause and evidence.
      restart: processes and flags of the restart; None leaves them to whatever restarts the run.
    """

    number: int
    time: float
    step: int
    num_processes: int
    process: int
    alarm: dict[str, Any]
    restart: Restart | None = None


Plan = Callable[[int], Restart]
"""Restart without the process of this index; raises ValueError with the reason if there is none."""


class Drainer:
    """Decision whether an alarm drains the run, for its first process.

    Args:
      run_folder, num_processes: of the run.
      every: fewest seconds between two drains of the run, over its restarts too.
      plan: the restart on fewer processes; None leaves it to whatever restarts the run.
    """

    def __init__(
        self, run_folder: Path, num_processes: int, every: float | int, plan: Plan | None = None
    ):
        self._run_folder, self._num_processes = run_folder, num_processes
        self._every, self._plan = every, plan
        self._requested: tuple[Alarm, Fleet | None, Restart | None] | None = None

    @property
    def requested(self) -> bool:
        """True once the run has to end."""
        return self._requested is not None

    def consider(self, alarms: Sequence[Alarm], fleet: Fleet | None) -> str | None:
        """Requests a drain for the first of the new alarms, the most certain.

        Returns:
          A line with the reason if it cannot be drained.
        """
        if not alarms or self.requested:
            return None
        alarm = alarms[0]
        try:
            self._check(alarm)
            restart = None if self._plan is None else self._plan(process_of(alarm.machine))
        except ValueError as error:
            return f"{alarm.machine} is not drained, the run continues with it: {error}"
        self._requested = alarm, fleet, restart
        return None

    def write(self, step: int) -> str:
        """Writes the evidence of the requested drain, and returns it in one line.

        The checkpoint of `step` was saved for it.
        """
        assert self._requested is not None
        alarm, fleet, restart = self._requested
        drains = read_drains(self._run_folder)
        drain = Drain(
            number=drains[-1].number + 1 if drains else 1,
            time=time.time(),
            step=step,
            num_processes=self._num_processes,
            process=process_of(alarm.machine),
            alarm=alarm_to_json(alarm),
            restart=restart,
        )
        path = self._run_folder / FOLDER / f"drain-{drain.number}.json"
        path.parent.mkdir(exist_ok=True)
        if fleet is not None and fleet.values.nbytes <= MAX_BYTES:
            fleet.save(path.with_suffix(".npz"))
        records.replace(path, (json.dumps(asdict(drain), indent=2) + "\n").encode())
        return f"drained {alarm.machine} after step {step}: {alarm.describe()}; evidence: {path}"

    def _check(self, alarm: Alarm) -> None:
        """Raises ValueError with the reason for which this alarm may not drain the run."""
        if not 0 <= process_of(alarm.machine) < self._num_processes:
            raise ValueError("it is no process of this run.")
        drains = read_drains(self._run_folder)
        seconds = time.time() - drains[-1].time if drains else math.inf
        if seconds < self._every:
            raise ValueError(
                f"the last drain was {seconds:.0f} s ago, and drain_every={self._every:g} allows "
                "one in that many seconds."
            )


def process_of(machine: str) -> int:
    """Index of a process from its name, see `jrl.faults.guard.machine_name`; -1 without one."""
    index = machine.rpartition("-")[2]
    return int(index) if index.isdecimal() else -1


def alarm_to_json(alarm: Alarm) -> dict[str, Any]:
    """Alarm as JSON values, with its evidence; NaN is a text, as in all files of a run."""
    evidence = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in alarm.evidence.items()
    }
    return records.plain(
        {
            "machine": alarm.machine,
            "metric": alarm.metric,
            "start": float(alarm.start),
            "end": float(alarm.end),
            "cause": alarm.cause,
            "line": alarm.describe(),
            "evidence": evidence,
        }
    )


def read_drains(run_folder: Path) -> list[Drain]:
    """Drains of a run so far, in their order.

    Raises:
      ValueError: where a record is damaged.
    """
    drains = []
    for path in (run_folder / FOLDER).glob("drain-*.json"):
        if re.fullmatch(r"drain-\d+\.json", path.name) is None:
            continue
        content = records.read_object(path, "delete it, or put it back as it was")
        try:
            restart = content.pop("restart")
            if restart is not None:
                processes, flags = tuple(restart["processes"]), tuple(restart["flags"])
                restart = Restart(processes, flags, restart["layout"])
            drains.append(Drain(**content, restart=restart))
        except (KeyError, TypeError):
            raise ValueError(
                f"{path} is no record of a drain: delete it, or put it back as it was."
            ) from None
    return sorted(drains, key=lambda drain: drain.number)
