"""Metric sources of the sampler: the process and its host through psutil, its GPUs through NVML.

A source is created once, lists the metrics that this machine has, and is read at every sample.
Counters become rates over the time since the last reading, so a late reading is still correct.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from jrl.checks import import_extra

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
    except nvml.NVMLError:  # the package without a driver
        return available
    return [*available, Gpus(nvml, gpus)]


def import_psutil() -> ModuleType:
    """The package that reads the host, see `import_extra`."""
    return import_extra("psutil", "faults", "sampling (--faults)")
