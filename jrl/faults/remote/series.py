"""Time series of exporters: the device and GPU of each, wrong times, and one value per tick of a
metric that multiple series of a machine measure.

The set of the series changes: one misses a scrape, a MIG instance is created, a GPU is given to
another pod. Each device is therefore followed by itself, whatever its labels, before devices are
aggregated: a sum or a mean does not move because a member comes or goes.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Float64

from jrl.faults.collect.vocabulary import most_severe

DAY = 86400.0
MAX_GAP = 7 * DAY
"""Gap in seconds between samples beyond which a clock is wrong, not a fleet at rest."""

GPU_LABELS = ("gpu", "GPU_I_ID", "nvswitch", "nvlink", "cpu", "cpucore")
"""Labels of DCGM's exporter that identify a part of a machine: a GPU and its MIG instance, a link.
Others (pod, namespace, err_code, modelName, Hostname) may change while the device stays."""
SCRAPE_LABELS = frozenset(
    {
        *("__name__", "machine", "node", "nodename", "instance", "Hostname", "hostname", "cluster"),
        *("job", "service", "endpoint", "metrics_path", "prometheus", "prometheus_replica"),
        *("replica", "receive", "tenant_id"),
    }
)
"""Labels of the exporter and of the server that scrapes it, which identify no part of a machine."""
POD_LABELS = frozenset({"pod", "namespace", "container"})
"""Labels of the pod of node exporter; elsewhere they identify what is measured."""
LEVEL, COUNTER, TOTAL, CODE = "level", "counter", "total", "code"
"""Compared as it is; as a rate; kept as a total, as it must not increase; an error code."""
MAX_DIP = 2
"""Samples for which a total may be less than before and after: exporters read 0 at times. A reset
of a counter, of which the next error is new, lasts longer."""
MARGIN = 0.1
"""Part of a record at its ends in which a device may be absent and still count as there
throughout."""


@dataclass(frozen=True)
class Series:
    """One time series of an exporter: labels, times and values.

    Attributes:
      labels: with the name under ``__name__``.
      times: Unix time of each sample in seconds, in order.
      values: NaN if it was no number.
    """

    labels: Mapping[str, str]
    times: Float64[np.ndarray, "sample"]
    values: Float64[np.ndarray, "sample"]


def device_of(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Metric and device of a series inside its machine; its UUID and changing labels do not count.

    Two series of one device are one, for example of a GPU that has been given to another pod, or of
    one exporter that two jobs scrape.
    """
    name = labels["__name__"]
    if name.startswith("DCGM_"):
        return name, *(labels.get(key, "") for key in GPU_LABELS)
    other = SCRAPE_LABELS | POD_LABELS if name.startswith("node_") else SCRAPE_LABELS
    return name, *(f"{key}={labels[key]}" for key in sorted(labels.keys() - other))


def gpus_of(series: Sequence[Series], machines: Sequence[str]) -> list[str | None]:
    """GPU index of each series; None for a series that is not about a GPU.

    A GPU with a UUID keeps one index, the newest, if a reset has renumbered the GPUs of its
    machine. Where indices are missing, the order of the UUIDs gives them.
    """
    newest: dict[tuple[str, str], tuple[float, str]] = {}
    unnumbered: defaultdict[str, set[str]] = defaultdict(set)
    for each, machine in zip(series, machines, strict=True):
        uuid, index = uuid_of(each), each.labels.get("gpu")
        if uuid and index is None:
            unnumbered[machine].add(uuid)
        elif uuid and index is not None and each.times.size:
            latest = (float(each.times[-1]), index)
            newest[machine, uuid] = max(newest.get((machine, uuid), latest), latest)
    indices = {key: index for key, (_, index) in newest.items()}
    for machine, uuids in unnumbered.items():
        for index, uuid in enumerate(sorted(uuids)):
            indices.setdefault((machine, uuid), str(index))
    return [
        indices.get((machine, uuid_of(each) or ""), each.labels.get("gpu"))
        for each, machine in zip(series, machines, strict=True)
    ]


def check_times(series: Sequence[Series], machines: Sequence[str]) -> None:
    """Raises an error for series that are days away from the others, as one of the clocks is wrong.

    Raises:
      ValueError: names a machine on the side that has fewer samples.
    """
    stretches = []
    for each, machine in zip(series, machines, strict=True):
        segments = [each.times]
        if each.times.size and each.times[-1] - each.times[0] > MAX_GAP:
            edges = np.flatnonzero(np.diff(each.times) > MAX_GAP) + 1
            segments = np.split(each.times, edges)
        for segment in segments:
            if segment.size:
                stretches.append((float(segment[0]), float(segment[-1]), segment.size, machine))
    stretches.sort()
    ends = np.maximum.accumulate([last for _, last, _, _ in stretches] or [0.0])
    for index in range(1, len(stretches)):
        gap = stretches[index][0] - float(ends[index - 1])
        if gap > MAX_GAP:
            groups = (stretches[:index], stretches[index:])
            few, many = sorted(groups, key=lambda group: sum(size for _, _, size, _ in group))
            subject = f"{few[0][3]!r} has samples {_format_date(few[0][0])}"
            raise ValueError(
                f"{subject}, {gap / DAY:.0f} days away from the others "
                f"({_format_date(many[-1][0])}): set its clock right, leave it out of the query, "
                "or ask for one time at a time."
            )


def uuid_of(series: Series) -> str | None:
    """UUID of the GPU that a series is about."""
    return series.labels.get("UUID", series.labels.get("uuid"))


def _format_date(time: float) -> str:
    """A Unix time as a date, or as a number if it is out of the calendar's range."""
    try:
        return datetime.fromtimestamp(time, UTC).strftime("of %Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return f"of the Unix time {time:g}"


def aggregate(
    kind: str, devices: Sequence[Hashable], rows: Float64[np.ndarray, "series tick"]
) -> Float64[np.ndarray, "tick"]:
    """Aggregates the series of one metric of a machine.

    Of codes the most severe counts, levels are averaged over the devices that are there throughout,
    rates and totals are summed. A total starts from the first readings of all devices and increases
    with any of them.

    Args:
      devices: the device of each series.
    """
    if len(rows) == 1:
        return rows[0]
    rows_of: defaultdict[Hashable, list[np.ndarray]] = defaultdict(list)
    for device, row in zip(devices, rows, strict=True):
        rows_of[device].append(row)
    merged = np.stack([_merge(kind, np.stack(each)) for each in rows_of.values()])
    present = np.asarray(np.isfinite(merged).any(axis=0))
    if len(merged) == 1 or not present.any():
        return merged[0]
    if kind == COUNTER:  # a rate holds for the time since the last reading
        total = np.nansum([_fill(row[::-1])[::-1] for row in merged], axis=0)
    elif kind == TOTAL:
        total = sum(_accumulate(row) for row in merged if np.isfinite(row).any())
    elif kind == CODE:
        total = _most_severe(np.stack([_fill(row) for row in merged]))
    else:
        total = _mean_of_lasting(merged, present)
    return np.where(present, total, np.nan)


def mask_dips(values: np.ndarray, *, zeros_only: bool = False) -> np.ndarray:
    """Mask of the readings of a total that are less than before, and soon return to it or more.

    Args:
      zeros_only: of an error code only a 0 between two equal codes is masked.
    """
    mask = np.zeros(len(values), bool)
    index = np.flatnonzero(np.isfinite(values))
    finite = values[index]
    for drop in np.flatnonzero(np.diff(finite) < 0).tolist():
        after = finite[drop + 1 : drop + 2 + MAX_DIP]
        if zeros_only:
            back = np.flatnonzero(after == finite[drop])
        else:
            back = np.flatnonzero(after >= finite[drop])
        if back.size and not (zeros_only and after[: back[0]].any()):
            mask[index[drop + 1 : drop + 1 + back[0]]] = True
    return mask


def resample(
    kind: str, series: Series, start: float, period: float | int, length: int
) -> Float64[np.ndarray, "tick"]:
    """Resamples a series to ticks, counters as rates; a counter that decreased gives no value."""
    times, values = series.times, series.values
    if kind in (TOTAL, CODE):
        values = np.where(mask_dips(values, zeros_only=kind == CODE), np.nan, values)
    if kind == COUNTER:
        finite = np.isfinite(values)
        times, values = times[finite], values[finite]
        seconds, differences = np.diff(times), np.diff(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where((differences >= 0) & (seconds > 0), differences / seconds, np.nan)
        times = times[1:]
    row = np.full(length, np.nan)
    row[np.floor((times - start) / period + 0.5).astype(int)] = values
    return row


def _merge(kind: str, rows: np.ndarray) -> np.ndarray:
    """The readings of one device under several labels, of which mostly one is there at a time."""
    if len(rows) == 1:
        return rows[0]
    if kind == CODE:
        return _most_severe(rows)
    if kind == TOTAL:
        return np.fmax.reduce(rows)
    count = np.isfinite(rows).sum(axis=0)
    return np.where(count > 0, np.nansum(rows, axis=0) / np.maximum(count, 1), np.nan)


def _fill(row: np.ndarray) -> np.ndarray:
    """A row whose gaps between two readings have the reading before."""
    seen = np.flatnonzero(np.isfinite(row))
    if seen.size == 0:
        return row
    filled = row.copy()
    inside = np.arange(seen[0], seen[-1] + 1)
    filled[inside] = row[seen[np.searchsorted(seen, inside, side="right") - 1]]
    return filled


def _extend(row: np.ndarray) -> np.ndarray:
    """A filled row that has its first reading before it, and its last after it."""
    seen = np.flatnonzero(np.isfinite(row))
    filled = _fill(row)
    filled[: seen[0]], filled[seen[-1] :] = row[seen[0]], row[seen[-1]]
    return filled


def _accumulate(row: np.ndarray) -> np.ndarray:
    """A total from its first reading on, which resets do not decrease."""
    filled = _extend(row)
    return filled[0] + np.r_[0.0, np.cumsum(np.maximum(np.diff(filled), 0))]


def _mean_of_lasting(rows: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Mean over the devices that are there throughout; over the devices of each tick if none is."""
    ticks = np.flatnonzero(present)
    margin = max(MAX_DIP, MARGIN * (ticks[-1] - ticks[0]))
    seen = [np.flatnonzero(np.isfinite(row)) for row in rows]
    lasting = [
        _extend(row)
        for row, at in zip(rows, seen, strict=True)
        if at.size and at[0] <= ticks[0] + margin and at[-1] >= ticks[-1] - margin
    ]
    if lasting:
        return np.mean(lasting, axis=0)
    count = np.isfinite(rows).sum(axis=0)
    return np.nansum(rows, axis=0) / np.maximum(count, 1)


def _most_severe(rows: np.ndarray) -> np.ndarray:
    """The most severe code of each tick: the codes of several errors, or of parts of one GPU."""
    highest = np.fmax.reduce(rows)
    for tick in np.flatnonzero(np.fmin.reduce(rows) != highest):
        codes = rows[np.isfinite(rows[:, tick]), tick]
        highest[tick] = most_severe(codes.tolist()) if codes.size else np.nan
    return highest
