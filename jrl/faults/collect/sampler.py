"""Sampler of a training process: records metrics of the process and its host once a second, and
serves the newest to Prometheus.

Its sources are psutil for the process and its host, and NVML for its GPUs. A source is created
once, lists the metrics that this machine has, and is read at every sample. Counters become rates
over the time since the last reading, so a late reading is still correct.

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
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from jrl.checks import import_extra
from jrl.faults.collect.record import Writer
from jrl.faults.collect.vocabulary import SLOWDOWN, STEP_TIME, exported_name
from jrl.processes.limited_server import Answer, LimitedServer

MEBIBYTE = 2.0**20
ALL_LINKS = 0xFFFFFFFF
"""NVML's scope of a field that is summed over all NVLinks; without it the first link answers."""
CORRECTED, UNCORRECTED = 0, 1
SINCE_LOADED = 0
"""NVML's counter of errors since the driver was loaded, not over the GPU's life."""


@runtime_checkable
class Source(Protocol):
    """Interface of a metric source, as the sampler reads it.

    Attributes:
      columns: names of all the metrics that `read` may give.
    """

    columns: tuple[str, ...]

    def read(self, time: float) -> Mapping[str, float]:
        """The metrics now; `time` in seconds on a clock that never goes back."""
        ...


class Rates:
    """Converts counters to rates per second; the first reading and a decrease give no rate."""

    def __init__(self):
        self._before: tuple[float, Mapping[str, float]] | None = None

    def __call__(self, time: float, counters: Mapping[str, float]) -> dict[str, float]:
        before, self._before = self._before, (time, dict(counters))
        if before is None or time <= before[0]:
            return {}
        seconds = time - before[0]
        return {
            name: (counters[name] - old) / seconds
            for name, old in before[1].items()
            if name in counters and counters[name] >= old
        }


class Host:
    """CPU, memory, disk and network of this process and its host.

    ==================  ==========================================================
    ``cpu/process``     cores this process keeps busy
    ``cpu/host``        cores that are busy on the host
    ``memory/process``  resident memory of this process, MiB
    ``memory/host``     memory of the host in use, as a fraction
    ``disk/read``       MiB per second, all disks of the host; ``disk/write`` too
    ``network/in``      MiB per second, all interfaces; ``network/out`` too
    ``switches``        times per second that this process was taken off its core
    ==================  ==========================================================

    Raises:
      ValueError: where psutil is not installed.
    """

    def __init__(self):
        self._psutil = import_psutil()
        self._process = self._psutil.Process()
        self._rates = Rates()
        gauges, counters = self._measure()
        self.columns = (*counters, *gauges)

    def read(self, time: float) -> Mapping[str, float]:
        gauges, counters = self._measure()
        return {**self._rates(time, counters), **gauges}

    def _measure(self) -> tuple[dict[str, float], dict[str, float]]:
        """Gauges and cumulative counters of the process and its host."""
        psutil, process = self._psutil, self._process
        with process.oneshot():
            cpu, memory = process.cpu_times(), process.memory_info().rss
            switches = process.num_ctx_switches().involuntary
        host = psutil.cpu_times()
        idle = host.idle + getattr(host, "iowait", 0.0)
        guests = getattr(host, "guest", 0.0) + getattr(host, "guest_nice", 0.0)  # in user already
        counters = {
            "cpu/process": cpu.user + cpu.system,
            "cpu/host": sum(host) - guests - idle,
            "switches": float(switches),
        }
        disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
        if disk is not None:  # a container may show no disk
            counters["disk/read"] = disk.read_bytes / MEBIBYTE
            counters["disk/write"] = disk.write_bytes / MEBIBYTE
        if network is not None:
            counters["network/in"] = network.bytes_recv / MEBIBYTE
            counters["network/out"] = network.bytes_sent / MEBIBYTE
        gauges = {
            "memory/process": memory / MEBIBYTE,
            "memory/host": psutil.virtual_memory().percent / 100.0,
        }
        return gauges, counters


class Gpus:
    """The NVIDIA GPUs of this host through NVML, each under ``gpuN/``.

    ``duty_cycle`` and ``memory_bandwidth`` are fractions of time, ``power`` is in watts,
    ``temperature`` in degrees Celsius, ``clock/sm`` and ``clock/memory`` in MHz, ``memory`` in MiB,
    ``pcie/in``, ``pcie/out``, ``nvlink/in`` and ``nvlink/out`` in MiB per second, these over all
    links. ``ecc/uncorrected`` is a count since the driver was loaded, ``ecc/corrected`` and
    ``pcie/replays`` are errors per second. Metrics that a GPU does not support are left out.

    Processes of one host are compared with each other, so each gives its own GPUs only, numbered
    from 0: the same column is then one GPU of each.

    Args:
      nvml: the module pynvml, initialised.
      gpus: this process's GPUs, as CUDA numbers or UUIDs; None takes all of the host.
    """

    def __init__(self, nvml: Any, gpus: Sequence[str] | None = None):
        self._nvml, self._rates = nvml, Rates()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(int(name))
            if str(name).isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(name)
            for name in (range(nvml.nvmlDeviceGetCount()) if gpus is None else gpus)
        ]
        gauges, counters = (
            {
                f"gpu{index}/{name}": partial(reader, handle)
                for index, handle in enumerate(handles)
                for name, reader in readers.items()
            }
            for readers in (self._gauges(), self._counters())
        )
        self._gauge_readers = {column: gauges[column] for column in self._measure(gauges)}
        self._counter_readers = {column: counters[column] for column in self._measure(counters)}
        self.columns = (*self._gauge_readers, *self._counter_readers)

    def read(self, time: float) -> Mapping[str, float]:
        counters = self._measure(self._counter_readers)
        return {**self._measure(self._gauge_readers), **self._rates(time, counters)}

    def _measure(self, readers: Mapping[str, Callable[[], float]]) -> dict[str, float]:
        """Values of the metrics that their GPU and its driver support."""
        values = {}
        for column, reader in readers.items():
            with suppress(self._nvml.NVMLError):
                values[column] = float(reader())
        return values

    def _gauges(self) -> dict[str, Callable[[Any], float]]:
        nvml = self._nvml
        # Older versions of the package lack some functions.
        ecc_errors = getattr(nvml, "nvmlDeviceGetTotalEccErrors", None)
        fatal = {}
        if ecc_errors is not None:
            fatal["ecc/uncorrected"] = lambda h: ecc_errors(h, UNCORRECTED, SINCE_LOADED)
        return fatal | {
            "duty_cycle": lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100,
            "memory_bandwidth": lambda h: nvml.nvmlDeviceGetUtilizationRates(h).memory / 100,
            "power": lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
            "temperature": lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
            "clock/sm": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
            "clock/memory": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM),
            "memory": lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used / MEBIBYTE,
            # NVML measures these for 20 ms and answers in KiB/s.
            "pcie/in": lambda h: (
                nvml.nvmlDeviceGetPcieThroughput(h, nvml.NVML_PCIE_UTIL_RX_BYTES) / 1024
            ),
            "pcie/out": lambda h: (
                nvml.nvmlDeviceGetPcieThroughput(h, nvml.NVML_PCIE_UTIL_TX_BYTES) / 1024
            ),
        }

    def _counters(self) -> dict[str, Callable[[Any], float]]:
        nvml = self._nvml

        def nvlink(handle: Any, field: int) -> float:
            """KiB over all links since the driver started."""
            answer = nvml.nvmlDeviceGetFieldValues(handle, [(field, ALL_LINKS)])[0]
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(answer.nvmlReturn)
            return answer.value.ullVal / 1024

        errors: dict[str, Callable[[Any], float]] = {}
        ecc_errors = getattr(nvml, "nvmlDeviceGetTotalEccErrors", None)
        if ecc_errors is not None:
            errors["ecc/corrected"] = lambda h: ecc_errors(h, CORRECTED, SINCE_LOADED)
        if hasattr(nvml, "nvmlDeviceGetPcieReplayCounter"):
            errors["pcie/replays"] = nvml.nvmlDeviceGetPcieReplayCounter
        return errors | {
            "nvlink/in": lambda h: nvlink(h, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            "nvlink/out": lambda h: nvlink(h, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        }


def local_gpus(local: Sequence[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs of the host that a process computes on, as NVML identifies them.

    Args:
      local: CUDA's numbers of its devices: positions among the visible ones.
      environment: the process's environment; its ``CUDA_VISIBLE_DEVICES`` lists the visible ones.
    """
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if visible == [""]:
        return tuple(map(str, local))
    return tuple(visible[index] for index in local if index < len(visible))


def available_sources(gpus: Sequence[str] | None = None) -> list[Source]:
    """The host, and the `Gpus` of this process where pynvml and an NVIDIA driver are installed."""
    available: list[Source] = [Host()]
    try:
        import pynvml as nvml
    except ModuleNotFoundError:
        return available
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver
        return available
    return [*available, Gpus(nvml, gpus)]


def import_psutil() -> ModuleType:
    """The package that reads the host, see `import_extra`."""
    return import_extra("psutil", "faults", "sampling (--faults)")


USUAL_DELAY = 0.05
"""Seconds by which a thread may be late on a host that is merely busy."""
ADDRESS = "127.0.0.1"
TICKS = 10
"""Ticks whose delays count."""


class StepClock:
    """Step timer that the training loop reports to; every method costs some microseconds.

    ``step/time`` is the mean duration of the steps that ended since the last sample, in seconds,
    or the age of the step in flight if longer, so that a step that hangs is detected while it
    hangs. It has no value before the first step has ended.

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
      latest: Unix time and metrics of the newest sample; time 0 before the first.

    Raises:
      ValueError: if psutil is missing, or for an impossible period.
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
