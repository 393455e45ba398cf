"""Metrics by name: the sampler's, Prometheus's and the denoising models', and their valid ranges;
and XID error codes of NVIDIA's driver.

The sampler writes ``gpu0/power``, its exporter ``jrl_gpu0_power``, and the model of
``gpu_power_draw`` denoises both, as in Minder. An unknown name is unchanged. The names of other
exporters are mapped to the sampler's when their pages are read, see `jrl.faults.remote.exporters`.

DCGM's ``DCGM_FI_DEV_XID_ERRORS`` is the code of the last error, not a count. Its cause follows the
action that NVIDIA's catalogue recommends. It is the machine, with its links, firmware and driver,
if the GPU is to be reset, the machine restarted or its support contacted immediately. It is the
program if the program is to be debugged. Else it is unknown.
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

STEP_TIME = "step/time"
"""Duration of a training step in seconds; available in every trainer, whatever the hardware."""

SLOWDOWN = "process/slowdown"
"""Duration of a tick of the sampler relative to its nominal duration; 1 for a running process."""

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

MEANINGS = {
    "cpu/process": "cpu_usage",
    "memory/process": "memory_usage",
    "disk/read": "disk_usage",
    "disk/write": "disk_usage",
    "network/in": "tcp_throughput",
    "network/out": "tcp_throughput",
    "network/pfc": "pfc_tx_packet_rate",
    "network/cnp": "cnp_rate",
    "rdma/in": "rdma_throughput",
    "rdma/out": "rdma_throughput",
    "gpu/duty_cycle": "gpu_duty_cycle",
    "gpu/power": "gpu_power_draw",
    "gpu/temperature": "gpu_temperature",
    "gpu/clock/sm": "gpu_clock",
    "gpu/memory": "gpu_memory_used",
    "gpu/memory_bandwidth": "gpu_memory_bandwidth",
    "gpu/engine_activity": "graphics_engine_activity",
    "gpu/sm_activity": "sm_activity",
    "gpu/tensor_activity": "tensor_core_activity",
    "gpu/pcie/in": "pcie_bandwidth",
    "gpu/pcie/out": "pcie_bandwidth",
    "gpu/nvlink": "nvlink_bandwidth",
    "gpu/nvlink/in": "nvlink_bandwidth",
    "gpu/nvlink/out": "nvlink_bandwidth",
    STEP_TIME: STEP_TIME,
}
"""From the sampler's names, ``gpu`` for any GPU, to the names of models and detectors."""

PRIORITY = (*PRODUCTION, STEP_TIME)
"""The order in which metrics are searched: the paper's, then the time of a step."""

LEVELS = ("memory/process", "memory/host", "gpu/memory")
"""Memory in use, which differs by rank: compared only on request."""

GPU_ACTIVITY = (
    "gpu_duty_cycle",
    "gpu_power_draw",
    "graphics_engine_activity",
    "tensor_core_activity",
    "sm_activity",
    "gpu_memory_bandwidth",
)
"""Metrics that one cause moves together: a GPU's load."""

FATAL = (
    "gpu/xid",
    "gpu/ecc/uncorrected",
    "gpu/rows/remap_failure",
    "memory/ecc/uncorrected",
    "rdma/link_downed",
)
"""Counters, kept as totals, that do not increase on a healthy machine."""

ERROR_RATES = (
    "gpu/ecc/corrected",
    "gpu/pcie/replays",
    "gpu/nvlink/errors",
    "gpu/rows/remapped",
    "gpu/throttled",
    "memory/ecc/corrected",
    "rdma/errors",
    "network/errors",
    "cpu/throttled",
)
"""Errors a second that machines correct by themselves, and throttling."""
BEYOND = np.finfo(np.float64).max
PERCENT = (0.0, 100.0)
CELSIUS = (-40.0, 150.0)
RANGES = {
    # Fractions or per cent, as an exporter has them.
    "gpu/duty_cycle": PERCENT,
    "gpu/memory_bandwidth": PERCENT,
    "gpu/engine_activity": PERCENT,
    "gpu/sm_activity": PERCENT,
    "gpu/tensor_activity": PERCENT,
    "gpu/temperature": CELSIUS,
    "gpu/temperature/memory": CELSIUS,
    "gpu/power": (0.0, 1e4),  # watts
    "gpu/clock/sm": (0.0, 1e4),  # MHz
    "gpu/clock/memory": (0.0, 1e5),
    "gpu/memory": (0.0, 1e8),  # MiB
    # Bytes or MiB a second.
    "gpu/pcie/in": (0.0, 1e13),
    "gpu/pcie/out": (0.0, 1e13),
    "gpu/nvlink/in": (0.0, 1e14),
    "gpu/nvlink/out": (0.0, 1e14),
    "gpu/xid": (0.0, 9999.0),
    "gpu/ecc/uncorrected": (0.0, 1e9),
    "gpu/rows/remap_failure": (0.0, 1.0),
    "memory/ecc/uncorrected": (0.0, 1e12),
    "rdma/link_downed": (0.0, 2.0**32 - 2),  # a counter of 32 bits stays at its greatest number
    "memory/host": (0.0, 1e18),
    "memory/process": (0.0, 1e18),
    "step/time": (0.0, 1e9),  # seconds
}
"""Valid range of each metric, ends included, by the sampler's name, in any unit it may have."""


def exported_name(name: str) -> str:
    """Valid Prometheus name of a metric."""
    return "jrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


_SAMPLED = {exported_name(name): name for name in (*MEANINGS, *LEVELS, *FATAL, *RANGES)}
"""From the names of its exporter to the sampler's."""


@lru_cache(4096)
def of_any_gpu(name: str) -> str:
    """The sampler's name of a metric, without the number of its GPU; unknown names stay."""
    generic = re.sub(r"^(jrl_)?gpu\d+([/_])", r"\1gpu\2", name)
    return _SAMPLED.get(generic, generic)


def meaning(name: str) -> str:
    """Name of a recorded metric in models and detectors."""
    return MEANINGS.get(of_any_gpu(name), name)


def is_fatal(name: str) -> bool:
    """True if a metric counts errors that no healthy machine has."""
    return of_any_gpu(name) in FATAL


def is_code(name: str) -> bool:
    """True if a metric is the code of the last error, see `XID`."""
    return of_any_gpu(name) == "gpu/xid"


def is_error_rate(name: str) -> bool:
    """True if a metric is a rate of corrected errors or of throttling."""
    return of_any_gpu(name) in ERROR_RATES


def gpu_of(name: str) -> str:
    """GPU of a metric, such as ``gpu0``; empty for other names."""
    match = re.match(r"(?:jrl_)?(gpu\d+)[/_]", name)
    return match[1] if match else ""


def groups_of(metrics: Iterable[str]) -> list[tuple[str, ...]]:
    """Metrics that one cause moves together, two at least: a GPU's activity, by GPU."""
    groups: dict[str, list[str]] = {}
    for name in metrics:
        if meaning(name) in GPU_ACTIVITY:
            groups.setdefault(gpu_of(name), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def find_recorded(requested: Sequence[str], recorded: Iterable[str]) -> tuple[str, ...]:
    """The recorded metrics that mean one of the requested, in their order."""
    by_meaning: dict[str, list[str]] = {}
    for name in recorded:
        by_meaning.setdefault(meaning(name), []).append(name)
    selected: dict[str, None] = {}
    for name in requested:
        same = by_meaning.get(meaning(name), [])
        # A recorded name that is requested literally selects only itself.
        selected |= dict.fromkeys([name] if name in same else same)
    return tuple(selected)


def search_order(priority: Sequence[str], recorded: Sequence[str]) -> tuple[str, ...]:
    """The recorded metrics in the order of `priority`, then others not in `LEVELS` and `FATAL`."""
    first = find_recorded(priority, recorded)
    others = [name for name in recorded if of_any_gpu(name) not in {*LEVELS, *FATAL}]
    return tuple(dict.fromkeys((*first, *others)))


def mask_valid(name: str, readings: np.ndarray) -> np.ndarray:
    """Mask of the readings in the valid range of a recorded metric; false for NaN and infinity."""
    least, greatest = RANGES.get(of_any_gpu(name), (-BEYOND, BEYOND))
    return (readings >= least) & (readings <= greatest)


Cause = Literal["machine", "program", "unknown"]
CAUSES: tuple[Cause, ...] = ("machine", "program", "unknown")


@dataclass(frozen=True)
class ErrorCode:
    """Meaning and usual cause of an XID code.

    Attributes:
      code: as the driver logs it.
      meaning: in a few words.
      cause: the usual one, one of `CAUSES`.
      handled: true if the machine has recovered by itself, so that no action is needed.
    """

    code: int
    meaning: str
    cause: Cause
    handled: bool = False

    def describe(self) -> str:
        """One phrase: the code, its meaning and its usual cause."""
        whose = {
            "machine": "machine fault",
            "program": "usually a program fault",
            "unknown": "unknown cause",
        }[self.cause]
        handled = ", which handled it" if self.handled else ""
        return f"XID {self.code} ({self.meaning}; {whose}{handled})"

    @property
    def severity(self) -> int:
        """Severity rank: of several codes at the same time the one with the greatest counts."""
        return 0 if not self.code else 1 + (self.cause != "program") + 2 * self.is_alarming

    @property
    def is_alarming(self) -> bool:
        """True if the machine needs attention."""
        return self.cause == "machine" and not self.handled


_MACHINE = {
    32: "corrupted push buffer, often the PCIe link",
    46: "GPU stopped processing and needs a reset",
    48: "uncorrectable (double bit) ECC error",
    54: "auxiliary power is not connected",
    57: "memory link training failed",
    58: "memory error",
    62: "internal microcontroller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault, often hardware",
    119: "GSP firmware did not answer",
    120: "GSP firmware error",
    136: "NVLink training failed",
    140: "unrecovered ECC error",
    143: "GPU could not be initialised",
    144: "NVLink SAW error",
    145: "NVLink RLW error",
    146: "NVLink TLW error",
    147: "NVLink TREX error",
    148: "NVLink controller error",
    149: "NVLink network interface error",
    150: "NVLink MSE error",
    154: "recovery of the GPU is required, after another error",
    156: "resource retired, reset needed",
    157: "resource could not be retired",
    158: "GPU does not answer",
    167: "PCIe does not answer",
    168: "errors in protected memory",
    169: "security microcontroller halted",
    171: "uncorrectable DRAM error",
    172: "uncorrectable SRAM error",
}
_HANDLED = {
    63: "memory row remapped",
    92: "many corrected single bit ECC errors",
    93: "InfoROM wear limit",
    121: "corrected errors of the link to the CPU",
    160: "channel retired",
    162: "power smoothing on again",
    163: "power smoothing off",
    164: "power smoothing near the end of its life",
    165: "power smoothing at the end of its life",
}
_PROGRAM = {
    11: "invalid push buffer",
    13: "illegal instruction or address in a kernel",
    14: "injected by a program",
    25: "illegal push buffer",
    31: "memory page fault, an illegal address",
    43: "program stopped by its own fault",
    45: "program ended or killed, often after another error",
    69: "error in the use of the graphics engine",
    106: "test message",
    107: "test message",
    137: "illegal access over NVLink",
}
_UNKNOWN = {
    8: "GPU stopped processing",
    37: "driver firmware error",
    38: "driver firmware watchdog",
    44: "fault during a context switch",
    60: "video processor exception",
    61: "internal microcontroller breakpoint",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    68: "video decoder exception",
    78: "virtual GPU could not be started",
    80: "corrupted data sent to the GPU",
    141: "CUDA fast path error",
    151: "key rotation error",
    155: "NVLink taken down by software",
    159: "error on the link to the CPU",
    161: "channel could not be retired",
}
_UNKNOWN |= dict.fromkeys(
    (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine exception"
)
_UNKNOWN |= dict.fromkeys(
    (82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142), "media engine exception"
)

_TABLES: tuple[tuple[dict[int, str], Cause, bool], ...] = (
    (_MACHINE, "machine", False),
    (_HANDLED, "machine", True),
    (_PROGRAM, "program", False),
    (_UNKNOWN, "unknown", False),
)
XID = {
    code: ErrorCode(code, meaning, cause, handled)
    for table, cause, handled in _TABLES
    for code, meaning in table.items()
}
"""The codes of NVIDIA's catalogue that are in use, and codes of older GPUs for hardware faults."""


def error_code(code: float | int | np.floating) -> ErrorCode:
    """Returns the entry of a code; the cause of one that is not in the catalogue is unknown."""
    return XID.get(int(code), ErrorCode(int(code), "not in the catalogue", "unknown"))


def most_severe(codes: Iterable[float | int | np.floating]) -> float | int | np.floating:
    """The code with the greatest `ErrorCode.severity`; of equal ones the greatest number."""
    return max(codes, key=lambda code: (error_code(code).severity, code))
