"""Fault detection inside a training loop: a sampler in every process, a watcher in the first.

Neither changes the values of the training: the loop reports the end of each step and polls for
alarms. An alarm may drain the run: it ends after a checkpoint, for a restart that leaves out the
faulty machine. Each drain leaves its evidence in the run folder: ``faults/drain-N.json`` with the
alarm, the step and the restart, and ``faults/drain-N.npz`` with the samples that the detector
compared.
"""

import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jrl.faults.collect.fleet import Alarm, Detector, Fleet
from jrl.faults.collect.sampler import Exporter, Sampler, available_sources
from jrl.faults.watcher import Hook, Watcher
from jrl.runs import records

DETECTION_INTERVAL = 30.0
"""Seconds between two detection passes of the watcher. Minder runs every 8 minutes."""

PATIENCE = 2.0
"""Seconds that the end of a training waits for its watcher."""
MAX_BYTES = 2**26
"""Bytes of samples beyond which they are not stored with a drain."""
FOLDER = "faults"
"""Folder of samples and drains in a run folder."""


@dataclass(frozen=True)
class Attachment:
    """Settings of fault detection in one training process.

    Attributes:
      folder: of the run; samples go to ``faults/`` in it.
      machine: this process's name among the others.
      watches: true if this process compares all of them; one of them should.
      detector: names the outlier machines.
      hooks: called for each alarm, in the watcher's thread and in this order.
      port: port at which Prometheus may scrape the newest sample; None serves none.
      interval: seconds between two detection passes of the watcher.
      gpus: this process's GPUs, see `local_gpus`; None takes all of the host.
    """

    folder: Path
    machine: str
    watches: bool
    detector: Detector
    hooks: tuple[Hook, ...] = ()
    port: int | None = None
    interval: float | int = DETECTION_INTERVAL
    gpus: tuple[str, ...] | None = None


class Guard:
    """Watches a training from inside, from `__enter__` to `__exit__`.

    Args:
      attachment: its settings; None watches nothing, and every method does nothing.

    Attributes:
      fleet: samples that the detector compared when it last raised an alarm; None before.

    Raises:
      ValueError: where psutil or, for a port, prometheus-client is not installed.
    """

    def __init__(self, attachment: Attachment | None):
        self._attachment = attachment
        self._stack = ExitStack()
        self._sampler: Sampler | None = None
        self._raised: queue.SimpleQueue[Alarm] = queue.SimpleQueue()
        self.fleet: Fleet | None = None
        self._stop = threading.Event()

    def step_ended(self, seconds: float) -> None:
        """Records the end of a training step and its duration."""
        if self._sampler is not None:
            self._sampler.clock.step(seconds)

    def alarms(self) -> list[Alarm]:
        """The alarms raised since the last call."""
        return [self._raised.get() for _ in range(self._raised.qsize())]

    def __enter__(self) -> "Guard":
        if self._attachment is None:
            return self
        settings = self._attachment
        with ExitStack() as stack:  # closes what has started if the rest cannot start
            read = available_sources(settings.gpus)
            sampler = Sampler(settings.folder / "faults", settings.machine, read=read)
            self._sampler = stack.enter_context(sampler)
            if settings.port is not None:
                exporter = Exporter(lambda: sampler.latest, settings.machine, settings.port)
                stack.enter_context(exporter)
            if settings.watches:
                thread = threading.Thread(target=self._watch, args=(settings,), name="watcher")
                thread.daemon = True
                thread.start()
                # A hook may wait for this process to end, so the wait for it is bounded.
                stack.callback(thread.join, PATIENCE)
                stack.callback(self._stop.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _watch(self, settings: Attachment) -> None:
        watcher = Watcher({"": settings.folder / "faults"}, settings.detector)
        while not self._stop.wait(settings.interval):
            result = watcher.detect()
            if result.raised:
                self.fleet = result.fleet
            for alarm in result.raised:
                self._raised.put(alarm)
                for hook in settings.hooks:
                    hook(alarm)


def machine_name(host: str, index: int) -> str:
    """Name of the process with this index on this host, valid as a file name."""
    return re.sub(r"[^a-zA-Z0-9_-]", "-", host).strip("-") + f"-{index}"


def metrics_of(alarms: list[Alarm]) -> dict[str, float]:
    """Alarms as metrics: the Unix time since which a machine is an outlier, machine in the name.

    They go into the line of the step in which they were raised. An alarm raised after the last
    step, while its checkpoint is written, is shown and reaches the hooks, but has no line.
    """
    return {f"faults/alarm/{alarm.machine}/{alarm.metric}": float(alarm.start) for alarm in alarms}


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
    """Index of a process from its name, see `machine_name`; -1 if it has none."""
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
      ValueError: if a record is damaged.
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
