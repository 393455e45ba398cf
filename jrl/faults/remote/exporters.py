"""Mapping of the metrics of DCGM's exporter, node exporter and cAdvisor to the sampler's names.

Each metric is a level, a counter (compared as a rate), a counter of fatal errors (kept as a total),
or the code of the last error. `jrl.faults.remote.series` aggregates the devices of a machine.

https://github.com/NVIDIA/dcgm-exporter  https://github.com/prometheus/node_exporter
https://github.com/google/cadvisor/blob/master/docs/storage/prometheus.md
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jrl.faults.collect.fleet import Fleet
from jrl.faults.collect.vocabulary import mask_valid
from jrl.faults.remote.machines import (
    ANSWERS,
    IDENTITY,
    PAGE,
    describe_unjoined,
    list_some,
    machines_of,
)
from jrl.faults.remote.series import (
    CODE,
    COUNTER,
    LEVEL,
    TOTAL,
    Series,
    aggregate,
    check_times,
    device_of,
    gpus_of,
    resample,
    uuid_of,
)

MAX_VALUES = 2**28
"""Values of a fleet: 1 GiB."""
MAX_NAMED = 12

BLANKS = (
    (float(0x7FFFFFF0), float(0x7FFFFFFF)),  # of 32 bits, and of fields that were once such
    (2.0**47, 2.0**47 + 15),  # of floating point; counters of 64 bits go on beyond it
    (float(0x7FFFFFFFFFFFFFF0), np.inf),  # of 64 bits, as a double: 2^63 and beyond
)
"""The least and the greatest number of each of DCGM's kinds of blanks, which exporters pass on as
if they were measured: "blank", "not found", "not supported" and "not permitted". DCGM's own test
treats all that is not below the first as blank.

https://github.com/NVIDIA/DCGM/blob/master/dcgmlib/dcgm_structs.h"""

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
    "DEV_XID_ERRORS": ("gpu/xid", CODE),
    "DEV_ECC_SBE_VOL_TOTAL": ("gpu/ecc/corrected", COUNTER),
    "DEV_ECC_DBE_VOL_TOTAL": ("gpu/ecc/uncorrected", TOTAL),
    "DEV_ROW_REMAP_FAILURE": ("gpu/rows/remap_failure", TOTAL),
    "DEV_UNCORRECTABLE_REMAPPED_ROWS": ("gpu/rows/remapped", COUNTER),
    "DEV_CORRECTABLE_REMAPPED_ROWS": ("gpu/rows/remapped", COUNTER),
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
EXPORTED = {f"DCGM_FI_{name}": entry for name, entry in _DCGM.items()} | {
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
"""The sampler's name of an exported metric, and its kind."""
# In a string of PromQL a backslash begins an escape: these do without.
_PATTERNS = (
    (re.compile(r"node_ethtool_[a-z0-9_]*prio[0-9]_pause(_total)?"), ("network/pfc", COUNTER)),
    (re.compile(r"node_(ethtool|infiniband)_[a-z0-9_]*cnp[a-z0-9_]*"), ("network/cnp", COUNTER)),
)
_EXPORTERS = re.compile(
    r"(DCGM|dcgm|node|container|go|promhttp|scrape|machine_(cpu|dimm|memory|nvm|node|scrape|swap)"
    r"|process_(cpu|max|network|open|resident|start|virtual))_\w+|up"
)
"""Names of DCGM's exporter, of node exporter, of cAdvisor, and what exporters say of themselves."""
_SELECTED = (ANSWERS, IDENTITY, *EXPORTED, *(pattern.pattern for pattern, _ in _PATTERNS))
SELECTOR = '{__name__=~"jrl_.+|' + "|".join(_SELECTED) + '"}'
"""Selector that a Prometheus server is queried with: all known names."""


def find_metric(name: str) -> tuple[str, str] | None:
    """The sampler's name of an exported metric and its kind; None for an unknown metric."""
    if name in EXPORTED:
        return EXPORTED[name]
    return next((entry for pattern, entry in _PATTERNS if pattern.fullmatch(name)), None)


def is_ignored(name: str, requested: Collection[str] = ()) -> bool:
    """True if a name of a known exporter is ignored, see `describe_ignored`."""
    return (
        name not in requested
        and find_metric(name) is None
        and _EXPORTERS.fullmatch(name) is not None
    )


def describe_ignored(series: Iterable[Series], requested: Collection[str] = ()) -> list[str]:
    """One line that lists the metrics of known exporters that are not compared; empty if there are
    none.

    It is unknown if such a metric is a level or a counter, and how its devices are aggregated. Some
    of DCGM's default list, such as the energy since boot, would look like a shift. The `requested`
    are compared nevertheless.
    """
    names = sorted({each.labels["__name__"] for each in series} - {ANSWERS, IDENTITY})
    names = [name for name in names if is_ignored(name, requested)]
    if not names:
        return []
    shown = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
    return [
        f"{len(names)} metrics of exporters are unknown and not compared: {shown} (--metrics NAME "
        "compares one)."
    ]


@dataclass(frozen=True)
class Sorted:
    """Series of exporters by machine.

    Attributes:
      series: those that are compared.
      machines: the machine of each.
      columns: the metric of each, in the sampler's names.
      unanswered: by machine of which no exporter answers, the Unix time since when.
      notes: who does not answer and what could not be joined, one line each.
    """

    series: list[Series]
    machines: list[str]
    columns: list[str]
    unanswered: dict[str, float]
    notes: list[str]


def sort_series(
    series: Sequence[Series], *, label: str | None = None, requested: Collection[str] = ()
) -> Sorted:
    """Sorts series of any exporters by machine.

    Unknown names of exporters are left out, see `describe_ignored`.

    Args:
      label: names the machine, see `machines_of`.
      requested: names that are included although they are unknown.

    Raises:
      ValueError: if a series names no machine.
    """
    compared = [each for each in _drop_container_series(series) if _is_compared(each, requested)]
    jobs = {each.labels.get("job") for each in compared}
    answers = [
        each
        for each in series
        if each.labels["__name__"] == ANSWERS
        and each.labels.get("job") in jobs
        and each.labels.keys() & {"instance" if label is None else label}
    ]
    identities = [
        # Its label "machine" is the processor's architecture.
        replace(each, labels={k: v for k, v in each.labels.items() if k != "machine"})
        for each in series
        if label is None and each.labels["__name__"] == IDENTITY and "instance" in each.labels
    ]
    every = machines_of([*compared, *answers, *identities], label)
    machines, machines_asked = every[: len(compared)], every[len(compared) :][: len(answers)]
    silent_since: defaultdict[str, list[float]] = defaultdict(list)
    silent = set[str]()
    for each, machine in zip(answers, machines_asked, strict=True):
        silent_since[machine].append(_unanswered_since(each))
        if silent_since[machine][-1] < np.inf and PAGE not in each.labels:
            silent.add(each.labels.get("instance", machine))
    unanswered = {name: max(times) for name, times in silent_since.items() if max(times) < np.inf}
    notes = [f"exporters do not answer their server: {list_some(silent)}"] if silent else []
    notes += describe_unjoined(compared, machines)
    columns = _columns_of(compared, gpus_of(compared, machines))
    return Sorted(compared, machines, columns, unanswered, notes)


def without_rare(parts: Sorted) -> Sorted:
    """Series without the metrics that fewer than half of the machines have."""
    machines_by_column: defaultdict[str, set[str]] = defaultdict(set)
    for column, machine in zip(parts.columns, parts.machines, strict=True):
        machines_by_column[column].add(machine)
    number = len(set(parts.machines))
    rare = {name for name, machines in machines_by_column.items() if 2 * len(machines) < number}
    frequent = [index for index, column in enumerate(parts.columns) if column not in rare]
    note = f"{len(rare)} metrics of fewer than half of the machines are left out: {list_some(rare)}"
    series = [parts.series[index] for index in frequent]
    machines = [parts.machines[index] for index in frequent]
    columns = [parts.columns[index] for index in frequent]
    return Sorted(series, machines, columns, parts.unanswered, [*parts.notes, note])


def _columns_of(series: Sequence[Series], gpus: Sequence[str | None]) -> list[str]:
    """Metric of each series in the sampler's names, with the number of its GPU."""
    columns = []
    for each, gpu in zip(series, gpus, strict=True):
        column = _column_and_kind(each.labels["__name__"])[0]
        numbered = column.startswith("gpu/") and gpu is not None
        columns.append(f"gpu{gpu}{column[3:]}" if numbered else column)
    return columns


def _column_and_kind(name: str) -> tuple[str, str]:
    return find_metric(name) or (name, COUNTER if name.endswith("_total") else LEVEL)


def _unanswered_since(answers: Series) -> float:
    """Unix time since which an exporter has not answered; infinite if it did at last."""
    answered = np.flatnonzero(answers.values > 0)
    first = answered[-1] + 1 if answered.size else 0
    return float(answers.times[first]) if first < answers.times.size else np.inf


def build_fleet(
    series: Sequence[Series],
    *,
    label: str | None = None,
    period: float | int | None = None,
    requested: Collection[str] = (),
) -> Fleet:
    """Series of any exporters as one fleet, in the sampler's names, see `assemble`."""
    return assemble(sort_series(series, label=label, requested=requested), period)


def assemble(parts: Sorted, period: float | int | None = None) -> Fleet:
    """Sorted series as one fleet, in the sampler's names.

    Invalid readings (`jrl.faults.collect.vocabulary`) are left out; the fleet's `blank` lists the
    machines and metrics that had any.

    Args:
      period: seconds between two samples; by default the usual gap in the series.

    Raises:
      ValueError: where times are too far apart.
    """
    compared = parts.series
    period = usual_period(compared, parts.machines) if period is None else period
    check_times(compared, parts.machines)
    series_by_column: defaultdict[tuple[str, str], list[tuple[str, Series]]] = defaultdict(list)
    for each, machine, column in zip(compared, parts.machines, parts.columns, strict=True):
        kind = _column_and_kind(each.labels["__name__"])[1]
        series_by_column[machine, column].append((kind, each))
    times = [each.times for each in compared if each.times.size]
    start = min((float(sample_times[0]) for sample_times in times), default=0.0)
    end = max((float(sample_times[-1]) for sample_times in times), default=start)
    length = int((end - start) / period + 0.5) + 1 if times else 0
    machines, metrics = (tuple(sorted({key[part] for key in series_by_column})) for part in (0, 1))
    if len(machines) * len(metrics) * length > MAX_VALUES:
        raise ValueError(
            f"the answer spans {length} ticks of {period} s for {len(machines)} machines and "
            f"{len(metrics)} metrics, {len(machines) * len(metrics) * length / 2**28:.0f} GiB: ask "
            "for a shorter time or fewer metrics, or give the query's step as the period."
        )
    values = np.full((len(machines), len(metrics), length), np.nan, np.float32)
    row_of, column_of = (
        {name: index for index, name in enumerate(names)} for names in (machines, metrics)
    )
    blank = set[tuple[str, str]]()
    for (machine, column), group in series_by_column.items():
        readings = [_mask_invalid(kind, column, each) for kind, each in group]
        if any(has_blanks for _, has_blanks in readings):
            blank.add((machine, column))
        kind = group[0][0]
        rows = [resample(kind, each, start, period, length) for each, _ in readings]
        if len(rows) > 1:
            devices = [_device_in_column(each, column) for _, each in group]
            rows = [aggregate(kind, devices, np.stack(rows))]
        values[row_of[machine], column_of[column]] = rows[0]
    return Fleet(machines, metrics, start, float(period), values, frozenset(blank))


def _device_in_column(series: Series, column: str) -> tuple[str | None, ...]:
    """Device of a series; inside the column of a GPU with a UUID, whatever number it had."""
    device = device_of(series.labels)
    if column.startswith("gpu") and uuid_of(series):
        return device[0], uuid_of(series), series.labels.get("GPU_I_ID")
    return device


def _is_compared(series: Series, requested: Collection[str]) -> bool:
    """True if a series is compared: not idle CPU time, the loopback device or an ignored name."""
    if series.labels.get("mode") in ("idle", "iowait") or series.labels.get("device") == "lo":
        return False
    return not is_ignored(series.labels["__name__"], requested)


def mask_blanks(readings: np.ndarray) -> np.ndarray:
    """Mask of the readings that are DCGM's blank values."""
    high = readings >= BLANKS[0][0]
    if not high.any():
        return high
    masks = [(readings >= least) & (readings <= greatest) for least, greatest in BLANKS]
    return np.logical_or.reduce(masks)


def _mask_invalid(kind: str, column: str, series: Series) -> tuple[Series, bool]:
    """A series with invalid readings as NaN, and true if there were any."""
    values, absent = series.values, np.isnan(series.values)
    # Counters are compared as rates, so that their size is not validated.
    valid = values >= 0 if kind == COUNTER else mask_valid(column, values)
    if series.labels["__name__"].startswith("DCGM_"):
        valid &= ~mask_blanks(values)
    blank = ~valid & ~absent
    values = np.where(valid, values, np.nan)
    if kind == CODE and valid.any():
        # Before the first error there is no code.
        values[blank & (np.cumsum(valid) == 0)] = 0.0
    return Series(series.labels, series.times, values), bool(blank.any())


def usual_period(series: Iterable[Series], machines: Iterable[str]) -> float:
    """Seconds between two samples, rounded if nearly whole; 1 without samples.

    It is the median over the machines of the median of each, so that no machine decides for all.
    """
    gaps_by_machine: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    for each, machine in zip(series, machines, strict=True):
        gaps = np.diff(each.times)
        if (gaps > 0).any():
            gaps_by_machine[machine].append(gaps[gaps > 0])
    if not gaps_by_machine:
        return 1.0
    middle = float(np.median([np.median(np.concatenate(g)) for g in gaps_by_machine.values()]))
    rounded = float(max(1, round(middle)))
    return rounded if abs(middle - rounded) < 0.1 * rounded else middle


def _drop_container_series(series: Sequence[Series]) -> list[Series]:
    """Removes cAdvisor's series of single containers where its root, their sum, is present."""
    roots = {
        (each.labels["__name__"], each.labels.get("instance"))
        for each in series
        if each.labels.get("id") == "/"
    }

    def is_part(labels: Mapping[str, str]) -> bool:
        name = labels["__name__"]
        if not name.startswith("container_") or labels.get("id") == "/":
            return False
        return (name, labels.get("instance")) in roots or labels.get("container") == "POD"

    return [each for each in series if not is_part(each.labels)]
