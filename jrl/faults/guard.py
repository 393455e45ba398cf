"""Fault detection inside a training loop: a sampler in every process, a watcher in the first.

Neither changes the values of the training: the loop reports the end of each step and polls for
alarms.
"""

import queue
import re
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from jrl.faults.collect.fleet import Alarm, Detector, Fleet
from jrl.faults.collect.sampler import Exporter, Sampler, available_sources
from jrl.faults.watcher import Hook, Watcher

DETECTION_INTERVAL = 30.0
"""Seconds between two detection passes of the watcher. Minder runs every 8 minutes."""

PATIENCE = 2.0
"""Seconds that the end of a training waits for its watcher."""


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
