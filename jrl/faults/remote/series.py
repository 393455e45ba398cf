"""Time series of exporters, the device and the GPU of each, and times that cannot be."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Float64

DAY = 86400.0
MAX_GAP = 7 * DAY
"""Seconds without any sample beyond which a clock is wrong, not a fleet at rest."""

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


@dataclass(frozen=True)
class Series:
    """One time series of an exporter: labels, times and values.

    Attributes:
      labels: with the name under ``__name__``.
      times: Unix time of each sample in seconds, in order.
      values: NaN where it was no number.
    """

    labels: Mapping[str, str]
    times: Float64[np.ndarray, "sample"]
    values: Float64[np.ndarray, "sample"]


def device_of(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Metric and device of a series inside its machine; its UUID and changing labels do not count.

    Two series of one device are one, such as those of a GPU that has been given to another pod, or
    those of one exporter that two jobs scrape.
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
