"""Mix of faults in production: share of each, the metrics it shows in, and other machines affected.

The shares are those of Minder's Table 1. Its indicator matrix (the share of cases in which a fault
shows in a metric) is known in three cells only (ECC: CPU 0.8, GPU 0.66; PCIe: PFC 1.0); the other
probabilities, all sizes and the group effects are choices.
"""

from dataclasses import dataclass
from types import MappingProxyType

GPU = (
    "gpu_duty_cycle",
    "gpu_power_draw",
    "graphics_engine_activity",
    "tensor_core_activity",
    "sm_activity",
    "gpu_memory_bandwidth",
)
NETWORK = ("rdma_throughput", "tcp_throughput")


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


CONGESTION = ("pfc_tx_packet_rate", "cnp_rate")
CPU = ("cpu_usage",)
NVLINK = ("nvlink_bandwidth",)
PCIE = ("pcie_bandwidth",)
MEMORY = ("memory_usage", "gpu_memory_used")
DISK = ("disk_usage",)

FAULTS = (
    Fault(
        "ECC error",
        "intra-host hardware",
        38.9,
        ((CPU, 0.80, -0.25), (GPU, 0.66, -0.30), (CONGESTION, 0.35, 0.25), (NVLINK, 0.40, -0.15)),
    ),
    Fault(
        "PCIe downgrading",
        "intra-host hardware",
        6.6,
        ((CONGESTION, 1.0, 0.40), (PCIE, 1.0, -0.15), (GPU, 0.3, -0.12), (NETWORK, 0.9, -0.1)),
        pipeline=0.45,
        fleet=0.25,
    ),
    Fault(
        "NIC dropout",
        "intra-host hardware",
        5.7,
        ((CONGESTION, 0.5, -0.12), (NETWORK, 1.0, -0.3), (CPU, 0.8, -0.25), (GPU, 0.8, -0.3)),
        pipeline=0.3,
    ),
    Fault(
        "GPU card drop",
        "intra-host hardware",
        2.0,
        ((GPU, 0.9, -0.35), (CPU, 0.7, -0.2), (NVLINK, 0.7, -0.25)),
    ),
    Fault("NVLink error", "intra-host hardware", 1.7, ((NVLINK, 1.0, -0.3), (GPU, 0.5, -0.2))),
    Fault(
        "AOC error",
        "intra-host hardware",
        0.9,
        ((NETWORK, 0.7, -0.1), (CONGESTION, 0.5, 0.12)),
        pipeline=0.4,
    ),
    Fault(
        "CUDA execution error",
        "intra-host software",
        14.6,
        ((CPU, 0.8, -0.25), (GPU, 0.75, -0.28), (NVLINK, 0.3, -0.15)),
    ),
    Fault(
        "GPU execution error",
        "intra-host software",
        7.7,
        ((GPU, 0.85, -0.25), (CPU, 0.5, -0.2), (CONGESTION, 0.3, 0.2)),
        pipeline=0.55,
        fleet=0.3,
    ),
    Fault(
        "HDFS error",
        "intra-host software",
        5.7,
        ((CPU, 0.85, -0.25), (DISK, 0.8, -0.08), (GPU, 0.5, -0.2)),
    ),
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
