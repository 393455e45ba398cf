"""Sampler of a training process: records metrics of the process and its host once a second, and
serves the newest to Prometheus.

It is a thread of the process itself, not another process: it ends with the process, leaves no
orphan and shares the step clock without messages. A wait in XLA or in a collective holds no
interpreter lock, so it does not block the sampler. A process that is stopped (SIGSTOP) stops its
sampler too: that shows as missing samples, and in the first sample after, whose rates and step time
cover the whole pause.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

from jrl.checks import import_extra
from jrl.faults.collect.record import Writer
from jrl.faults.collect.sources import Source, available_sources
from jrl.faults.collect.vocabulary import SLOWDOWN, STEP_TIME, exported_name
from jrl.processes.limited_server import Answer, LimitedServer

USUAL_DELAY = 0.05
"""Seconds by which a thread may be late on a host that is merely busy."""
ADDRESS = "127.0.0.1"
TICKS = 10
"""Ticks whose delays count."""


class StepClock:
    """Step timer that the training loop reports to; every method costs some microseconds.

    ``step/time`` is the mean duration of the steps that ended since the last sample, in seconds,
    or the age of the step in flight where that is longer, so that a step that hangs is detected
    while it hangs. It has no value before the first step has ended.

    Time spent waiting in collectives is not measured: a step is one compiled function, and the wait
    for its result is the time of the device, waiting for other devices included.
    """

    columns = (STEP_TIME,)

    def __init__(self):
        self._lock = threading.Lock()
        self._begun: float | None = None
        self._durations: list[float] = []
        self._last: float | None = None

    def step(self, seconds: float | None = None) -> None:
        """Records the end of a step of some seconds, by default since the last call, and the start
        of the next."""
        now = time.monotonic()
        with self._lock:
            if seconds is None and self._begun is not None:
                seconds = now - self._begun
            if seconds is not None:
                self._durations.append(seconds)
            self._begun = now

    def read(self, now: float) -> Mapping[str, float]:
        with self._lock:
            if self._durations:
                self._last = sum(self._durations) / len(self._durations)
                self._durations.clear()
            if self._last is None or self._begun is None:
                return {}
            return {STEP_TIME: max(self._last, now - self._begun)}


class TickDelays:
    """Slowdown of a process, from the delays of the sampler's thread.

    ``process/slowdown`` is ``1 + mean(max(0, delay - 0.05 s)) / period`` over the last ten ticks,
    ``delay`` the time from when the thread was due until it ran; of a tick that was missed, too.
    A process that is stopped for nine tenths of each second has some 1.4, one that is stopped for
    nine of ten seconds some 5. Steps do not show which process of a run is slow: all wait for one
    another in collectives.

    Args:
      period: seconds of a tick.
    """

    columns = (SLOWDOWN,)

    def __init__(self, period: float):
        self._period = period
        self._delays: deque[float] = deque(maxlen=TICKS)

    def tick(self, delay: float) -> int:
        """Records a tick with its delay, and those missed meanwhile, whose number it returns."""
        missed = int(max(0.0, delay) // self._period)
        for number in range(missed + 1):
            self._delays.append(delay - number * self._period)
        return missed

    def read(self, now: float) -> Mapping[str, float]:
        if not self._delays:
            return {}
        unusual = [max(0.0, delay - USUAL_DELAY) for delay in self._delays]
        return {SLOWDOWN: 1 + sum(unusual) / len(unusual) / self._period}


class Sampler:
    """Writes a sample every `period` seconds until it is closed.

    Args:
      folder: the record's folder.
      machine: the name under which this process is compared with others.
      period: seconds between two samples. Missed ticks are left out, not sampled later.
      read: the sources; the host and its GPUs by default.

    Attributes:
      clock: for the training loop to report to.
      latest: Unix time and metrics of the newest sample; time 0 where there is none yet.

    Raises:
      ValueError: where psutil is missing, or on a period that cannot be.
    """

    def __init__(
        self,
        folder: Path | str,
        machine: str,
        *,
        period: float | int = 1.0,
        read: Sequence[Source] | None = None,
    ):
        if not 0.01 <= period <= 3600:
            raise ValueError(f"period={period} must lie in 0.01..3600 seconds.")
        self.clock = StepClock()
        self._period = float(period)
        self._delays = TickDelays(self._period)
        sources = available_sources() if read is None else read
        self._sources = [*sources, self.clock, self._delays]
        self._stop = threading.Event()
        self.latest: tuple[float, dict[str, float]] = (0.0, {})
        columns = [name for source in self._sources for name in source.columns]
        self.writer = Writer(folder, machine, columns, begun=time.time())
        self._read()  # rates need a reading to start from
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def sample(self) -> dict[str, float]:
        """Takes one sample and writes it."""
        values = self._read()
        now = time.time()
        self.writer.append(now, values)
        self.latest = (now, values)
        return values

    def close(self) -> None:
        """Stops, and marks a clean end in the record."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.writer.close(time.time())

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += self._period * self._delays.tick(time.monotonic() - due)
            self.sample()
            due += self._period * (1 + max(0.0, time.monotonic() - due) // self._period)

    def _read(self) -> dict[str, float]:
        return {
            name: value
            for source in self._sources
            for name, value in source.read(time.monotonic()).items()
        }


class Exporter:
    """Serves the newest sample of a process to Prometheus, on ``http://HOST:PORT/metrics``.

    A metric such as ``step/time`` is called ``jrl_step_time`` there and has the label ``machine``.
    A server that scrapes once a second gets all samples of the record.

    Args:
      latest: `Sampler.latest` as a function.
      machine: the value of the label.
      port: 0 takes any free port, of this host only.

    Attributes:
      port: the port it listens on.

    Raises:
      ValueError: where prometheus-client is not installed, or the port is not available.
    """

    def __init__(
        self, latest: Callable[[], tuple[float, Mapping[str, float]]], machine: str, port: int
    ):
        self._module, self._latest, self._machine = import_client(), latest, machine
        self._registry = self._module.CollectorRegistry()
        self._registry.register(self)
        try:
            self._server = LimitedServer((ADDRESS, port), self._answer)
        except (OSError, OverflowError) as error:
            raise ValueError(f"port={port} on {ADDRESS} is not available: {error}") from None
        self.port: int = self._server.server_port

    def collect(self) -> Iterator[Any]:
        """Metrics of a scrape; prometheus-client calls this."""
        for name, value in self._latest()[1].items():
            gauge = self._module.metrics_core.GaugeMetricFamily(
                exported_name(name), f"{name} of a training process", labels=["machine"]
            )
            gauge.add_metric([self._machine], value)
            yield gauge

    def _answer(self, path: str) -> Answer:
        text = self._module.generate_latest(self._registry)
        return HTTPStatus.OK, text, "text/plain; version=0.0.4"

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def import_client() -> ModuleType:
    """The package that serves metrics, see `import_extra`."""
    return import_extra("prometheus_client", "faults", "an exporter")
