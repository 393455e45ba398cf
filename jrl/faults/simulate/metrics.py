"""Metrics of a simulated machine, reported each second, and their statistics in health.

Minder collects 21 metrics and names about 18, which are these; seven of them are used in
production. Their statistics are not published: the numbers below are our choices.
"""

from dataclasses import dataclass
from functools import partial

from jrl.faults.collect.vocabulary import PRODUCTION as PRODUCTION


@dataclass(frozen=True)
class Metric:
    """One metric of a healthy machine; levels and deviations are shares of `capacity`.

    Attributes:
      name: as in the fleet.
      capacity: the value that 1 stands for, in `unit`.
      unit: of the recorded values.
      level: its mean.
      compute: what the compute phase of a step adds over the communication phase; negative for a
        metric of the network.
      noise: standard deviation from one second to the next, independent.
      drift: standard deviation of the wandering over a minute or so.
      spread: standard deviation between machines, constant over time.
      spikes: share of the seconds in which a reading is off by itself.
      spike: mean size of these where they are not of a GPU.
      bursts: how often in an hour a machine bursts.
      burst: median size of a burst.
      gpu: true if GPUs report it: it bursts downwards, with the others of the GPU.
      counter: true if it is a difference of two readings of a counter.
      events: true if it counts events, whose rate can vary by factors.
    """

    name: str
    capacity: float
    unit: str
    level: float
    compute: float
    noise: float = 0.05
    drift: float = 0.012
    spread: float = 0.006
    spikes: float = 0.006
    spike: float = 0.3
    bursts: float = 0.05
    burst: float = 0.1
    gpu: bool = False
    counter: bool = False
    events: bool = False


_gpu, _counter = partial(Metric, gpu=True), partial(Metric, counter=True)
_slow = partial(Metric, spikes=0.0, bursts=0.0)
_congestion = partial(
    Metric, noise=0.04, spikes=0.01, bursts=0.4, burst=0.12, counter=True, events=True
)

METRICS = {
    metric.name: metric
    for metric in (
        _congestion("pfc_tx_packet_rate", 2e4, "packet/s", 0.12, -0.06),
        Metric("cpu_usage", 100.0, "%", 0.45, 0.05, noise=0.06, spikes=0.01),
        _gpu("gpu_duty_cycle", 100.0, "%", 0.80, 0.20, noise=0.04),
        _gpu("gpu_power_draw", 400.0, "W", 0.70, 0.25),
        _gpu("graphics_engine_activity", 100.0, "%", 0.75, 0.25),
        _gpu("tensor_core_activity", 100.0, "%", 0.45, 0.25),
        _counter("nvlink_bandwidth", 600.0, "GB/s", 0.40, -0.20),
        _gpu("sm_activity", 100.0, "%", 0.70, 0.25),
        _gpu("gpu_memory_bandwidth", 100.0, "%", 0.45, 0.15),
        _slow("gpu_memory_used", 80.0, "GB", 0.80, 0.02, noise=0.01),
        _slow("gpu_temperature", 100.0, "°C", 0.62, 0.01, noise=0.01, spread=0.03),
        _slow("gpu_clock", 1980.0, "MHz", 0.85, -0.02, noise=0.02),
        _counter("pcie_bandwidth", 32.0, "GB/s", 0.30, -0.15),
        _counter("rdma_throughput", 25.0, "GB/s", 0.35, -0.25),
        _congestion("cnp_rate", 1e4, "packet/s", 0.08, -0.04),
        _counter("tcp_throughput", 1.0, "GB/s", 0.10, 0.0, bursts=2.0),
        _slow("memory_usage", 100.0, "%", 0.40, 0.0, noise=0.005, spread=0.02),
        _counter("disk_usage", 100.0, "%", 0.10, 0.0, noise=0.03, bursts=2.0),
    )
}
"""By name."""
