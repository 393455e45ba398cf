"""What metrics are called: the sampler's names, Prometheus's and those that models are known by.

The sampler says ``gpu0/power``, its exporter ``jrl_gpu0_power``, and the model that denoises both
is that of ``gpu_power_draw``, as in `jrl.faults.simulate`. A name that nobody knows means itself.
"""

import re
from collections.abc import Iterable, Sequence

from jrl.faults.simulate.metrics import PRODUCTION

STEP_TIME = "step/time"
"""Duration of a training step in seconds: what every trainer has, whatever its machines tell."""

MEANINGS = {
    "cpu/process": "cpu_usage",
    "memory/process": "memory_usage",
    "disk/read": "disk_usage",
    "disk/write": "disk_usage",
    "network/in": "tcp_throughput",
    "network/out": "tcp_throughput",
    "gpu/duty_cycle": "gpu_duty_cycle",
    "gpu/power": "gpu_power_draw",
    "gpu/temperature": "gpu_temperature",
    "gpu/clock/sm": "gpu_clock",
    "gpu/memory": "gpu_memory_used",
    "gpu/memory_bandwidth": "gpu_memory_bandwidth",
    "gpu/pcie/in": "pcie_bandwidth",
    "gpu/pcie/out": "pcie_bandwidth",
    "gpu/nvlink/in": "nvlink_bandwidth",
    "gpu/nvlink/out": "nvlink_bandwidth",
    STEP_TIME: STEP_TIME,
}
"""From what the sampler writes, ``gpu`` for any of them, to what models and detectors go by."""


PRIORITY = (*PRODUCTION, STEP_TIME)
"""The order in which metrics are searched: the paper's, then the time of a step."""


LEVELS = ("memory/process", "memory/host", "gpu/memory")
"""What sound processes hold for good and not alike, as a rank needs it: compared when asked for."""


def exported_name(name: str) -> str:
    """The name of a metric as Prometheus allows it."""
    return "jrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


_EXPORTED = {exported_name(name): meaning for name, meaning in MEANINGS.items()}
_LEVELS = {*LEVELS, *map(exported_name, LEVELS)}


def meaning(name: str) -> str:
    """The name that models and detectors know a recorded metric by."""
    one = _of_any_gpu(name)
    return MEANINGS.get(one) or _EXPORTED.get(one) or name


def _of_any_gpu(name: str) -> str:
    return re.sub(r"^(jrl_)?gpu\d+([/_])", r"\1gpu\2", name)


def recorded_as(wanted: Sequence[str], recorded: Iterable[str]) -> tuple[str, ...]:
    """The recorded metrics that mean one of the wanted, in the order of the wanted."""
    by_meaning: dict[str, list[str]] = {}
    for name in recorded:
        by_meaning.setdefault(meaning(name), []).append(name)
    found: dict[str, None] = {}
    for name in wanted:
        same = by_meaning.get(meaning(name), [])
        # A name that was recorded as it stands asks for itself alone.
        found |= dict.fromkeys([name] if name in same else same)
    return tuple(found)


def searched(priority: Sequence[str], recorded: Sequence[str]) -> tuple[str, ...]:
    """The recorded metrics in the order of `priority`, then the others but for `LEVELS`."""
    first = recorded_as(priority, recorded)
    others = [name for name in recorded if _of_any_gpu(name) not in _LEVELS]
    return tuple(dict.fromkeys((*first, *others)))
