"""The pages of DCGM's exporter, of node exporter and of cAdvisor in the sampler's names.

Each metric is a level, a counter (compared as a rate), or a counter of fatal errors, which is kept
as it stands. What several devices of a machine give is summed for counters and averaged for levels.

https://github.com/NVIDIA/dcgm-exporter  https://github.com/prometheus/node_exporter
https://github.com/google/cadvisor/blob/master/docs/storage/prometheus.md
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from jrl.faults.fleet import Fleet

LEVEL, COUNTER, TOTAL = "level", "counter", "total"
"""Compared as it is; as a rate; kept as it stands, for it must not move."""
MACHINE_LABELS = ("machine", "node", "instance", "Hostname", "hostname")
"""Labels that name a machine, the first that is there; the port of an instance is left out."""
IDLE = ("idle", "iowait")

_DCGM = {
    "DEV_GPU_UTIL": ("gpu/duty_cycle", LEVEL),
    "DEV_MEM_COPY_UTIL": ("gpu/memory_bandwidth", LEVEL),
    "DEV_POWER_USAGE": ("gpu/power", LEVEL),
    "DEV_GPU_TEMP": ("gpu/temperature", LEVEL),
    "DEV_MEMORY_TEMP": ("gpu/temperature/memory", LEVEL),
    "DEV_SM_CLOCK": ("gpu/clock/sm", LEVEL),
    "DEV_MEM_CLOCK": ("gpu/clock/memory", LEVEL),
    "DEV_FB_USED": ("gpu/memory", LEVEL),
    "DEV_NVLINK_BANDWIDTH_TOTAL": ("gpu/nvlink", COUNTER),
    "DEV_PCIE_REPLAY_COUNTER": ("gpu/pcie/replays", COUNTER),
    "DEV_XID_ERRORS": ("gpu/xid", TOTAL),
    "DEV_ECC_SBE_VOL_TOTAL": ("gpu/ecc/corrected", COUNTER),
    "DEV_ECC_DBE_VOL_TOTAL": ("gpu/ecc/uncorrected", TOTAL),
    "DEV_ROW_REMAP_FAILURE": ("gpu/rows/remap_failure", TOTAL),
    "DEV_POWER_VIOLATION": ("gpu/throttled", COUNTER),
    "DEV_THERMAL_VIOLATION": ("gpu/throttled", COUNTER),
    "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("gpu/nvlink/errors", COUNTER),
    "DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": ("gpu/nvlink/errors", COUNTER),
    "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("gpu/nvlink/errors", COUNTER),
    "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("gpu/nvlink/errors", COUNTER),
    "PROF_GR_ENGINE_ACTIVE": ("gpu/engine_activity", LEVEL),
    "PROF_SM_ACTIVE": ("gpu/sm_activity", LEVEL),
    "PROF_PIPE_TENSOR_ACTIVE": ("gpu/tensor_activity", LEVEL),
    "PROF_DRAM_ACTIVE": ("gpu/memory_bandwidth", LEVEL),
    "PROF_PCIE_RX_BYTES": ("gpu/pcie/in", LEVEL),
    "PROF_PCIE_TX_BYTES": ("gpu/pcie/out", LEVEL),
    "PROF_NVLINK_RX_BYTES": ("gpu/nvlink/in", LEVEL),
    "PROF_NVLINK_TX_BYTES": ("gpu/nvlink/out", LEVEL),
}
EXPORTED = {f"DCGM_FI_{name}": found for name, found in _DCGM.items()} | {
    "node_cpu_seconds_total": ("cpu/host", COUNTER),
    "node_memory_MemAvailable_bytes": ("memory/host", LEVEL),
    "node_disk_read_bytes_total": ("disk/read", COUNTER),
    "node_disk_written_bytes_total": ("disk/write", COUNTER),
    "node_network_receive_bytes_total": ("network/in", COUNTER),
    "node_network_transmit_bytes_total": ("network/out", COUNTER),
    "node_network_receive_errs_total": ("network/errors", COUNTER),
    "node_network_transmit_errs_total": ("network/errors", COUNTER),
    "node_infiniband_port_data_received_bytes_total": ("rdma/in", COUNTER),
    "node_infiniband_port_data_transmitted_bytes_total": ("rdma/out", COUNTER),
    "node_infiniband_symbol_error_total": ("rdma/errors", COUNTER),
    "node_infiniband_port_errors_received_total": ("rdma/errors", COUNTER),
    "node_infiniband_link_error_recovery_total": ("rdma/errors", COUNTER),
    "node_infiniband_link_downed_total": ("rdma/link_downed", TOTAL),
    "node_edac_correctable_errors_total": ("memory/ecc/corrected", COUNTER),
    "node_edac_uncorrectable_errors_total": ("memory/ecc/uncorrected", TOTAL),
    "container_cpu_usage_seconds_total": ("cpu/process", COUNTER),
    "container_cpu_cfs_throttled_seconds_total": ("cpu/throttled", COUNTER),
    "container_memory_working_set_bytes": ("memory/process", LEVEL),
    "container_network_receive_bytes_total": ("network/in", COUNTER),
    "container_network_transmit_bytes_total": ("network/out", COUNTER),
    "container_fs_reads_bytes_total": ("disk/read", COUNTER),
    "container_fs_writes_bytes_total": ("disk/write", COUNTER),
}
"""The sampler's name of an exported metric, and what it is."""
# In a string of PromQL a backslash begins an escape: these do without.
_PATTERNS = (
    (re.compile(r"node_ethtool_[a-z0-9_]*prio[0-9]_pause(_total)?"), ("network/pfc", COUNTER)),
    (re.compile(r"node_(ethtool|infiniband)_[a-z0-9_]*cnp[a-z0-9_]*"), ("network/cnp", COUNTER)),
)
SELECTOR = '{__name__=~"jrl_.+|' + "|".join([*EXPORTED, *(p.pattern for p, _ in _PATTERNS)]) + '"}'
"""What a Prometheus server is asked for: all that is known by name."""


@dataclass(frozen=True)
class Series:
    """What one exporter said about one thing.

    Attributes:
      labels: with the name under ``__name__``.
      times: Unix time of each sample in seconds, in order.
      values: NaN where it was no number.
    """

    labels: Mapping[str, str]
    times: Float64[np.ndarray, "sample"]
    values: Float64[np.ndarray, "sample"]


def known_as(name: str) -> tuple[str, str] | None:
    """The sampler's name of an exported metric and its kind; None for one that nobody knows."""
    found = next((found for pattern, found in _PATTERNS if pattern.fullmatch(name)), None)
    return EXPORTED.get(name, found)


def machine_of(labels: Mapping[str, str], label: str | None = None) -> str:
    """The machine that labels are about.

    Raises:
      ValueError: where none of them names one.
    """
    names = MACHINE_LABELS if label is None else (label,)
    found = next((name for name in names if name in labels), None)
    if found is None:
        raise ValueError(
            f"a series of the answer has no label {' or '.join(map(repr, names))}: it has "
            f"{', '.join(labels) or 'none'}; choose another, or keep it in the query."
        )
    value = labels[found]
    return re.sub(r":\d+$", "", value) if label is None and found == "instance" else value


def as_fleet(
    series: Sequence[Series], *, label: str | None = None, period: float | int | None = None
) -> Fleet:
    """Series of any exporters as one fleet, in the sampler's names.

    Args:
      label: names the machine; by default the first of `MACHINE_LABELS` that a series has.
      period: seconds between two samples; by default what is usual in the series.

    Raises:
      ValueError: where a series names no machine, or times span more ticks than can be.
    """
    parts: defaultdict[tuple[str, str], list[tuple[str, Series]]] = defaultdict(list)
    for one in _told_once(series):
        name = one.labels["__name__"]
        if one.labels.get("mode") in IDLE or one.labels.get("device") == "lo":
            continue
        column, kind = known_as(name) or (name, COUNTER if name.endswith("_total") else LEVEL)
        if column.startswith("gpu/") and "gpu" in one.labels:
            column = f"gpu{one.labels['gpu']}{column[3:]}"
        parts[machine_of(one.labels, label), column].append((kind, one))
    period = usual_period(series) if period is None else period
    times = [one.times for one in series if one.times.size]
    start = min((float(each[0]) for each in times), default=0.0)
    end = max((float(each[-1]) for each in times), default=start)
    length = int((end - start) / period + 0.5) + 1 if times else 0
    machines, metrics = (tuple(sorted({key[part] for key in parts})) for part in (0, 1))
    if len(machines) * len(metrics) * length > 2**31:
        raise ValueError(
            f"the answer spans {length} ticks of {period} s: one of its times is wrong, or the "
            "period is not the query's step."
        )
    values = np.full((len(machines), len(metrics), length), np.nan, np.float32)
    for (machine, column), of in parts.items():
        rows = np.stack([_on_ticks(kind, one, start, period, length) for kind, one in of])
        count = np.isfinite(rows).sum(axis=0)
        total = np.where(np.isfinite(rows), rows, 0).sum(axis=0)
        if of[0][0] == LEVEL:
            total = total / np.maximum(count, 1)
        into = values[machines.index(machine), metrics.index(column)]
        into[:] = np.where(count > 0, total, np.nan)
    return Fleet(machines, metrics, start, float(period), values)


def usual_period(series: Iterable[Series]) -> float:
    """Seconds between two samples, a whole number where they are nearly that; 1 without any."""
    gaps = [np.diff(one.times) for one in series if one.times.size > 1]
    every = np.concatenate(gaps) if gaps else np.zeros(0)
    every = every[every > 0]
    if every.size == 0:
        return 1.0
    middle = float(np.median(every))
    whole = float(max(1, round(middle)))
    return whole if abs(middle - whole) < 0.1 * whole else middle


def _told_once(series: Sequence[Series]) -> list[Series]:
    """Without the parts of a whole that cAdvisor tells as well: its root holds all containers."""
    roots = {
        (one.labels["__name__"], one.labels.get("instance"))
        for one in series
        if one.labels.get("id") == "/"
    }
    kept = []
    for one in series:
        name, root = one.labels["__name__"], one.labels.get("id")
        part = name.startswith("container_") and root != "/"
        whole_is_told = (name, one.labels.get("instance")) in roots
        if not (part and (whole_is_told or one.labels.get("container") == "POD")):
            kept.append(one)
    return kept


def _on_ticks(
    kind: str, one: Series, start: float, period: float | int, length: int
) -> Float64[np.ndarray, "tick"]:
    """A series at its ticks, counters as rates; a counter that fell has none."""
    times, values = one.times, one.values
    if kind == COUNTER:
        seconds, moved = np.diff(times), np.diff(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where((moved >= 0) & (seconds > 0), moved / seconds, np.nan)
        times = times[1:]
    row = np.full(length, np.nan)
    row[np.floor((times - start) / period + 0.5).astype(int)] = values
    return row
