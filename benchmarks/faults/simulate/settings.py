"""Settings of simulated fleets: their metrics in health, and the mix of faults in production.

Minder collects 21 metrics and names about 18, which are these; seven of them are used in
production. Their statistics are not published: the numbers below are our choices. The shares of
faults are those of Minder's Table 1. Its indicator matrix (the share of cases in which a fault
shows in a metric) is known in three cells only (ECC: CPU 0.8, GPU 0.66; PCIe: PFC 1.0); the other
probabilities, all sizes and the group effects are choices.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from jrl.checks import check_range
from jrl.faults.collect.vocabulary import GPU_ACTIVITY as GPU
from jrl.faults.collect.vocabulary import PRODUCTION as PRODUCTION

NETWORK = ("rdma_throughput", "tcp_throughput")
CONGESTION = ("pfc_tx_packet_rate", "cnp_rate")
CPU = ("cpu_usage",)
NVLINK = ("nvlink_bandwidth",)
PCIE = ("pcie_bandwidth",)
MEMORY = ("memory_usage", "gpu_memory_used")
DISK = ("disk_usage",)
HARDWARE, SOFTWARE = "intra-host hardware", "intra-host software"


@dataclass(frozen=True)
class Metric:
    """One metric of a healthy machine; levels and deviations are shares of `capacity`.

    Attributes:
      name: as in the fleet.
      capacity: the value of a share of 1, in `unit`.
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


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
      name: what happened.
      family: class of Table 1.
      share: of all faults, in percent.
      shows: by group of metrics, the probability that it shows in them and by how much they change
        on the machine, as a share of their capacity. The metrics of a group show together.
      pipeline: how much of the change the machines of the same pipeline show.
      fleet: how much of it every machine shows, for all wait for the slowest.
    """

    name: str
    family: str
    share: float
    shows: tuple[tuple[tuple[str, ...], float, float], ...]
    pipeline: float = 0.15
    fleet: float = 0.1


FAULTS = (
    Fault(
        "ECC error",
        HARDWARE,
        38.9,
        ((CPU, 0.80, -0.25), (GPU, 0.66, -0.30), (CONGESTION, 0.35, 0.25), (NVLINK, 0.40, -0.15)),
    ),
    Fault(
        "PCIe downgrading",
        HARDWARE,
        6.6,
        ((CONGESTION, 1.0, 0.40), (PCIE, 1.0, -0.15), (GPU, 0.3, -0.12), (NETWORK, 0.9, -0.1)),
        pipeline=0.45,
        fleet=0.25,
    ),
    Fault(
        "NIC dropout",
        HARDWARE,
        5.7,
        ((CONGESTION, 0.5, -0.12), (NETWORK, 1.0, -0.3), (CPU, 0.8, -0.25), (GPU, 0.8, -0.3)),
        pipeline=0.3,
    ),
    Fault(
        "GPU card drop", HARDWARE, 2.0, ((GPU, 0.9, -0.35), (CPU, 0.7, -0.2), (NVLINK, 0.7, -0.25))
    ),
    Fault("NVLink error", HARDWARE, 1.7, ((NVLINK, 1.0, -0.3), (GPU, 0.5, -0.2))),
    Fault(
        "AOC error", HARDWARE, 0.9, ((NETWORK, 0.7, -0.1), (CONGESTION, 0.5, 0.12)), pipeline=0.4
    ),
    Fault(
        "CUDA execution error",
        SOFTWARE,
        14.6,
        ((CPU, 0.8, -0.25), (GPU, 0.75, -0.28), (NVLINK, 0.3, -0.15)),
    ),
    Fault(
        "GPU execution error",
        SOFTWARE,
        7.7,
        ((GPU, 0.85, -0.25), (CPU, 0.5, -0.2), (CONGESTION, 0.3, 0.2)),
        pipeline=0.55,
        fleet=0.3,
    ),
    Fault("HDFS error", SOFTWARE, 5.7, ((CPU, 0.85, -0.25), (DISK, 0.8, -0.08), (GPU, 0.5, -0.2))),
    Fault(
        "machine unreachable",
        "network",
        6.0,
        ((CPU, 0.8, -0.25), (NETWORK, 1.0, -0.25), (CONGESTION, 0.6, 0.3), (GPU, 0.6, -0.25)),
        pipeline=0.25,
    ),
    Fault(
        "other",
        "other",
        10.2,
        ((CPU, 0.5, 0.22), (GPU, 0.5, -0.22), (CONGESTION, 0.4, 0.22), (MEMORY, 0.4, 0.15)),
    ),
)

MIX = MappingProxyType({fault.name: fault.share / 100 for fault in FAULTS})
"""Share of each fault, as published; they sum to one."""


@dataclass(frozen=True)
class Settings:
    """Distribution of simulated fleets; a seed samples one of them.

    Attributes:
      machines: how many, at least 2; None samples it per fleet, log-uniform in 4 to 1,500.
      seconds: length of the record, at least 60.
      metrics: recorded metrics, names of `METRICS`.
      faulty: true if one machine fails.
      fault: the fault; None samples one from the published mix.
      earliest: seconds before which no fault begins, at least 0.
      difficulty: divides how far a fault moves the metrics, above 0.
      disturbances: scales how often readings are off, metrics burst and transient slowdowns come,
        and how many healthy machines differ from the others for good, at least 0.
      offsets: scales the last of these once more, at least 0.
      heavy_tails: true if rates of events (pause frames, notifications of congestion) vary by
        factors from one second to the next, as those of a switch under load do.
      drifts: share of healthy machines that one metric of drifts away, by up to a quarter of its
        level over a record of 15 minutes, in [0, 1].
      period: seconds between two samples, at least 1; each is the mean over them.
      missing: share of single samples that are lost, in [0, 1).
      outages: share of machines that report nothing for 5 to 40 seconds, in [0, 1].
      clock_skew: standard deviation of the machines' clocks, in seconds, at least 0.
    """

    machines: int | None = None
    seconds: int = 900
    metrics: tuple[str, ...] = PRODUCTION
    faulty: bool = True
    fault: str | None = None
    earliest: int = 30
    difficulty: float | int = 1.0
    disturbances: float | int = 1.0
    offsets: float | int = 1.0
    heavy_tails: bool = False
    drifts: float | int = 0.0
    period: int = 1
    missing: float | int = 0.01
    outages: float | int = 0.03
    clock_skew: float | int = 0.5

    def __post_init__(self):
        check_range(self, ("machines",), 2)
        check_range(self, ("seconds",), 60)
        if not 1 <= self.period <= self.seconds // 2:
            raise ValueError(f"period={self.period} must lie in 1..{self.seconds // 2} seconds.")
        unknown = [name for name in self.metrics if name not in METRICS]
        if unknown or not self.metrics:
            raise ValueError(
                f"metrics={self.metrics!r} must name one or more of {', '.join(METRICS)}."
            )
        if self.fault is not None and self.fault not in MIX:
            raise ValueError(f"fault={self.fault!r} is unknown: choose among {', '.join(MIX)}.")
        check_range(self, ("difficulty",), 0, above=True)
        check_range(self, ("earliest", "disturbances", "offsets", "clock_skew"), 0)
        for name, most in (("missing", 0.99), ("outages", 1.0), ("drifts", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, {most}].")
