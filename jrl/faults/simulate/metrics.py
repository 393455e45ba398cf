"""What a machine of a simulated fleet reports each second, and how it behaves in health.

Minder collects 21 metrics and names about 18, which are these; seven of them are used in
production. How each behaves is not published: the numbers below are choices.
"""

from dataclasses import dataclass


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
      bursts: share of the seconds with a burst of either sign (exponential, mean 0.15).
    """

    name: str
    capacity: float
    unit: str
    level: float
    compute: float
    noise: float = 0.05
    drift: float = 0.012
    spread: float = 0.006
    bursts: float = 0.0


METRICS = {
    metric.name: metric
    for metric in (
        Metric("pfc_tx_packet_rate", 2e4, "packet/s", 0.12, -0.06, noise=0.04, bursts=0.01),
        Metric("cpu_usage", 100.0, "%", 0.45, 0.05, noise=0.06),
        Metric("gpu_duty_cycle", 100.0, "%", 0.80, 0.20, noise=0.04),
        Metric("gpu_power_draw", 400.0, "W", 0.70, 0.25),
        Metric("graphics_engine_activity", 100.0, "%", 0.75, 0.25),
        Metric("tensor_core_activity", 100.0, "%", 0.45, 0.25),
        Metric("nvlink_bandwidth", 600.0, "GB/s", 0.40, -0.20),
        Metric("sm_activity", 100.0, "%", 0.70, 0.25),
        Metric("gpu_memory_bandwidth", 100.0, "%", 0.45, 0.15),
        Metric("gpu_memory_used", 80.0, "GB", 0.80, 0.02, noise=0.01),
        Metric("gpu_temperature", 100.0, "°C", 0.62, 0.01, noise=0.01, spread=0.03),
        Metric("gpu_clock", 1980.0, "MHz", 0.85, -0.02, noise=0.02),
        Metric("pcie_bandwidth", 32.0, "GB/s", 0.30, -0.15),
        Metric("rdma_throughput", 25.0, "GB/s", 0.35, -0.25),
        Metric("cnp_rate", 1e4, "packet/s", 0.08, -0.04, noise=0.04, bursts=0.03),
        Metric("tcp_throughput", 1.0, "GB/s", 0.10, 0.0, bursts=0.05),
        Metric("memory_usage", 100.0, "%", 0.40, 0.0, noise=0.005, spread=0.02),
        Metric("disk_usage", 100.0, "%", 0.10, 0.0, noise=0.03, bursts=0.05),
    )
}
"""By name."""

PRODUCTION = (
    "pfc_tx_packet_rate",
    "cpu_usage",
    "gpu_duty_cycle",
    "gpu_power_draw",
    "graphics_engine_activity",
    "tensor_core_activity",
    "nvlink_bandwidth",
)
"""The metrics that Minder uses in production, in its order of priority."""
