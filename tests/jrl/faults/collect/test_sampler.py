"""The sampler says what is there, costs next to nothing, and keeps its beat."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from places import ROOT

from jrl.faults.collect.record import read
from jrl.faults.collect.sampler import (
    Gpus,
    Host,
    Rates,
    Sampler,
    StepClock,
    TickDelays,
    available_sources,
    local_gpus,
)
from jrl.faults.collect.vocabulary import SLOWDOWN, STEP_TIME


def test_host_counts_cpu_and_memory_of_this_process(tmp_path):
    host = Host()
    idle = psutil.cpu_times().idle
    host.read(time.monotonic())
    begun, used = time.monotonic(), time.process_time()
    while time.process_time() < used + 0.3:
        sum(range(1000))
    (tmp_path / "file").write_bytes(os.urandom(1000))
    values = host.read(time.monotonic())
    seconds = time.monotonic() - begun
    busy = (time.process_time() - used) / seconds
    # The kernel counts in hundredths of a second.
    np.testing.assert_allclose(values["cpu/process"], busy, atol=0.02 / seconds + 0.05)
    assert values["cpu/host"] >= values["cpu/process"] - 0.03 / seconds
    idle = (psutil.cpu_times().idle - idle) / seconds
    assert values["cpu/host"] <= psutil.cpu_count() - idle + 0.3
    assert values["memory/process"] > 10 and 0 < values["memory/host"] <= 1
    assert set(values) <= set(host.columns)
    assert {"network/in", "network/out", "switches"} <= set(host.columns)


def test_rates_leave_out_decreases_and_equal_times():
    rates = Rates()
    assert rates(10.0, {"a": 1.0, "b": 5.0}) == {}
    assert rates(12.0, {"a": 4.0, "b": 3.0, "c": 1.0}) == {"a": 1.5}
    assert rates(12.0, {"a": 4.0}) == {}


def test_step_time_is_the_mean_or_the_age_of_the_step_under_way():
    clock = StepClock()
    assert clock.read(time.monotonic()) == {}
    clock.step()
    assert clock.read(time.monotonic()) == {}  # nothing has ended yet
    clock.step(0.2)
    clock.step(0.4)
    values = clock.read(time.monotonic())
    np.testing.assert_allclose(values[STEP_TIME], 0.3)
    hanging = clock.read(time.monotonic() + 7.0)
    assert 7.0 <= hanging[STEP_TIME] < 8.0


def test_a_stopped_process_is_slow_and_a_busy_one_is_not():
    busy = TickDelays(1.0)
    assert busy.read(0.0) == {}
    assert [busy.tick(0.04) for _ in range(12)] == [0] * 12
    assert busy.read(0.0) == {SLOWDOWN: 1.0}
    # Stopped for nine of ten seconds: nine ticks have come late, the tenth runs in time.
    stopped = TickDelays(1.0)
    assert stopped.tick(8.55) == 8
    assert stopped.tick(0.0) == 0
    delays = [8.5 - number for number in range(9)]
    assert stopped.read(0.0)[SLOWDOWN] == pytest.approx(1 + sum(delays) / 10)
    for _ in range(10):
        stopped.tick(0.0)
    assert stopped.read(0.0) == {SLOWDOWN: 1.0}


@pytest.mark.slow
def test_a_sampler_measures_how_late_its_thread_is(tmp_path):
    """Half of the ticks are due in a stop of the process: of 0.5 s in each second."""
    code = (
        "import sys, time; from jrl.faults.collect.sampler import Sampler\n"
        "with Sampler(sys.argv[1], 'host-0', period=0.1) as sampler:\n"
        "    time.sleep(12)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    try:
        while not list(tmp_path.iterdir()):
            time.sleep(0.1)
        for _ in range(4):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        assert process.wait(60) == 0
    finally:
        process.kill()
    (path,) = tmp_path.iterdir()
    record = read(path)
    slowdown = record.values[:, list(record.columns).index(SLOWDOWN)]
    # Of ten ticks five have delays from 0.5 s to 0.1 s, less what is usual: 1.25 of the periods.
    assert 1.8 < slowdown.max() < 3.5
    assert slowdown[-30:].min() < 1.5


def test_a_sample_costs_less_than_a_hundredth_of_a_core(tmp_path):
    """Once a second, 10 ms of CPU time would be 1 %; it is some 0.2 ms."""
    sampler = Sampler(tmp_path, "host-0", read=available_sources())
    begun = time.thread_time()
    for _ in range(100):
        sampler.clock.step(0.1)
        sampler.sample()
    seconds = (time.thread_time() - begun) / 100
    sampler.close()
    assert seconds < 0.01, f"{seconds * 1e3:.2f} ms per sample"


@pytest.mark.slow
def test_the_thread_keeps_its_beat_and_says_that_it_ended(tmp_path):
    with Sampler(tmp_path, "host-0", period=0.1) as sampler:
        for _ in range(8):
            time.sleep(0.1)
            sampler.clock.step(0.1)
        newest, values = sampler.latest
        assert newest > 0 and values[STEP_TIME] >= 0.1
    record = read(sampler.writer.path)
    # A loaded machine may be late: a missed tick is left out, never made up for.
    assert 2 <= len(record.times) <= 10 and record.ended
    assert (np.diff(record.times) > 0.005).all() or np.diff(record.times).mean() > 0.09


def test_a_period_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="period=0 must lie in"):
        Sampler(tmp_path, "host-0", period=0)


class NvmlError(Exception):
    """As pynvml's: raised if a GPU cannot tell."""


class Nvml:
    """The part of pynvml that is called, for two GPUs, the second without NVLink and power."""

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_SUCCESS = 0, 1, 2, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def __init__(self):
        self.kib = 0

    class Answer:
        def __init__(self, **values):
            self.__dict__.update(values)

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return {"GPU-b": 1}[uuid]

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        return 5 * kind + counter

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self.Answer(gpu=90 - handle, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle == 1:
            raise NvmlError("not supported")
        return 350_500

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return 1000 * clock

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self.Answer(used=3 * 2**30)

    def nvmlDeviceGetPcieThroughput(self, handle, counter):
        return 2048 * (1 + counter)

    def nvmlDeviceGetFieldValues(self, handle, fields):
        """As NVML: a field that lacks the scope of all links has the first of eight."""
        field, scope = fields[0] if isinstance(fields[0], tuple) else (fields[0], 0)
        links = 8 if scope == 0xFFFFFFFF else 1
        value = self.Answer(ullVal=self.kib * (field - 137) * links)
        return [self.Answer(nvmlReturn=3 if handle == 1 else 0, value=value)]


def test_gpus_read_units_and_leave_out_unsupported_metrics():
    nvml = Nvml()
    gpus = Gpus(nvml)
    assert "gpu0/nvlink/in" in gpus.columns and "gpu1/nvlink/in" not in gpus.columns
    gpus.read(10.0)
    nvml.kib = 4096
    values = gpus.read(12.0)
    assert set(values) == set(gpus.columns)
    assert (values["gpu0/duty_cycle"], values["gpu1/duty_cycle"]) == (0.9, 0.89)
    assert values["gpu0/power"] == 350.5 and "gpu1/power" not in values
    assert (values["gpu0/pcie/in"], values["gpu0/pcie/out"]) == (4.0, 2.0)
    assert (values["gpu0/nvlink/out"], values["gpu0/nvlink/in"]) == (16.0, 32.0)
    assert (values["gpu1/memory"], values["gpu1/clock/memory"]) == (3072.0, 2000.0)


def test_a_process_gives_its_own_gpus_only_numbered_from_zero():
    own = Gpus(Nvml(), local_gpus([0], {"CUDA_VISIBLE_DEVICES": "GPU-b"}))
    assert {name.partition("/")[0] for name in own.columns} == {"gpu0"}
    values = own.read(10.0)
    assert (values["gpu0/duty_cycle"], values["gpu0/ecc/uncorrected"]) == (0.89, 5.0)
    assert local_gpus([1, 3], {}) == ("1", "3")
    assert local_gpus([1], {"CUDA_VISIBLE_DEVICES": "4, 6"}) == ("6",)
