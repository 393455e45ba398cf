"""HTTP endpoint of a run in progress: Prometheus metrics and a health check.

``/metrics`` has every metric of the last step and the state of the process, for Prometheus;
``/health`` answers 200, or 503 once a step or a phase takes longer than its deadline, for the
liveness probe of a scheduler.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from types import ModuleType
from typing import Any

import jax

from jrl.checks import import_extra
from jrl.processes.limited_server import Answer, LimitedServer
from jrl.report.metrics import describe

PREFIX = "jrl_run_"
PhaseStatus = tuple[str, float, str | None]
"""Phase of a run, seconds since its start, and a line if it exceeds its deadline."""
MEMORY_STATISTICS = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")


class RunExporter:
    """Logger that serves the metrics of the last step, until it is closed.

    Args:
      port: to listen on; 0 takes a free one.
      labels: identify the run, for instance by its task.
      steps: number of steps of the whole run.
      deadline: seconds for a step with its evaluation and checkpoint, after which the health check
        fails; None sets no deadline. The first step, which compiles, has none.
      phase: returns the status of the phase; None if it is unknown.
      clock: seconds, monotonic.
      address: to listen on: of this host alone by default, "0.0.0.0" for all of its networks.

    Attributes:
      port: the port it listens on.

    Raises:
      ValueError: if prometheus-client is not installed, or the port is not available.
    """

    def __init__(
        self,
        port: int,
        labels: Mapping[str, str],
        steps: int,
        deadline: float | None = None,
        phase: Callable[[], PhaseStatus] | None = None,
        clock: Callable[[], float] = time.monotonic,
        address: str = "127.0.0.1",
    ):
        self._module = import_client()
        self._family = self._module.metrics_core.GaugeMetricFamily
        self._labels, self._steps, self._deadline, self._clock = labels, steps, deadline, clock
        self._phase = phase
        self._started = time.time()
        self._last: tuple[int, dict[str, float], float, float] | None = None
        self._registry = self._module.CollectorRegistry()
        self._registry.register(self)
        try:
            self._server = LimitedServer((address, port), self._answer)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"metrics_port={port} on metrics_address={address!r} is not available: {error}"
            ) from None
        self.port: int = self._server.server_port

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        # Metrics of an evaluation are kept until the next one.
        values = {} if self._last is None else self._last[1]
        values = values | {name: float(value) for name, value in metrics.items()}
        self._last = step, values, time.time(), self._clock()

    def close(self) -> None:
        self._server.close()

    def health(self) -> tuple[bool, str]:
        """True if the run is within its deadlines, and a line about it."""
        last, late = self._last, None if self._phase is None else self._phase()[2]
        if late is not None:
            return False, late
        if last is None:
            return True, "starting"
        step, seconds = last[0], self._clock() - last[3]
        if self._deadline is not None and seconds > self._deadline and step < self._steps:
            return False, (
                f"step {step + 1} has taken {seconds:.0f} s, more than "
                f"step_deadline={self._deadline:g} s"
            )
        return True, f"step {step} of {self._steps}, {seconds:.0f} s ago"

    def _answer(self, path: str) -> Answer:
        if path == "/metrics":
            return HTTPStatus.OK, self.text(), "text/plain; version=0.0.4"
        if path == "/health":
            healthy, line = self.health()
            status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
            return status, f"{line}\n".encode(), "text/plain"
        return HTTPStatus.NOT_FOUND, b"/metrics or /health\n", "text/plain"

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return self._module.generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """Metrics of a scrape; prometheus-client calls this."""
        yield self._labelled("info", "What is trained; always 1.", self._labels)
        yield self._gauge("start_time_seconds", "Unix time at which it started.", self._started)
        yield self._gauge("steps", "Steps of the whole run.", float(self._steps))
        text = "1, or 0 once a step or phase exceeds its deadline."
        yield self._gauge("healthy", text, float(self.health()[0]))
        if self._phase is not None:
            name, seconds, _ = self._phase()
            yield self._labelled("phase", "Phase of the process; always 1.", {"phase": name})
            yield self._gauge("phase_seconds", "Seconds since the phase was entered.", seconds)
        if self._last is not None:
            step, metrics, logged, _ = self._last
            yield self._gauge("step", "Last step that ended.", float(step))
            yield self._gauge("last_step_time_seconds", "Unix time at which it ended.", logged)
            for name, value in metrics.items():
                definition = describe(name)
                text = name if definition is None else f"{name}: {definition.definition}"
                yield self._gauge(exported_name(name).removeprefix(PREFIX), text, value)
        yield from self._memory()

    def _gauge(self, name: str, text: str, value: float) -> Any:
        return self._family(PREFIX + name, text, value=value)

    def _labelled(self, name: str, text: str, labels: Mapping[str, str]) -> Any:
        family = self._family(PREFIX + name, text, labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _memory(self) -> Iterator[Any]:
        text = "Memory of the devices of the process."
        family = self._family(PREFIX + "device_memory_bytes", text, labels=["device", "kind"])
        for device in jax.local_devices():
            statistics = device.memory_stats() or {}  # a CPU has none
            for kind in MEMORY_STATISTICS:
                if kind in statistics:
                    family.add_metric([str(device.id), kind], statistics[kind])
        yield family


def exported_name(name: str) -> str:
    """Prometheus's name of a metric of a run, for example ``jrl_step_time`` of ``step/time``."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def import_client() -> ModuleType:
    """Imports prometheus-client, which writes Prometheus's format; see `import_extra`."""
    return import_extra("prometheus_client", "faults", "--metrics-port")
