"""Time series of exporters, and the machine and GPU that each belongs to."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
from jaxtyping import Float64

MACHINE_LABELS = ("machine", "node", "instance", "Hostname", "hostname")
"""Labels that name a machine, in order of preference; the port of an instance is left out."""
DAY = 86400.0
MAX_GAP = 7 * DAY
"""Seconds without any sample beyond which a clock is wrong, not a fleet at rest."""


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


def machine_of(labels: Mapping[str, str], label: str | None = None) -> str:
    """The machine that labels are about.

    Raises:
      ValueError: where none of them names one.
    """
    names = MACHINE_LABELS if label is None else (label,)
    name = _first_label(labels, names)
    if name is None:
        raise ValueError(
            f"a series of the answer has no label {' or '.join(map(repr, names))}: it has "
            f"{', '.join(labels) or 'none'}; choose another, or keep it in the query."
        )
    value = labels[name]
    return re.sub(r":\d+$", "", value) if label is None and name == "instance" else value


def machines_of(series: Sequence[Series], label: str | None = None) -> list[str]:
    """Machine of each series, determined from all series together.

    * Multiple hosts that are scraped through one address (one ``instance``, multiple ``Hostname``)
      are multiple machines, unless `label` is given.
    * A machine that comes back under another address with a GPU of the same UUID, after everything
      under the old one has ended, is the same machine under its new name.

    Args:
      label: names the machine; by default the first of `MACHINE_LABELS` that a series has.

    Raises:
      ValueError: where a series names no machine.
    """
    names = [machine_of(each.labels, label) for each in series]
    if label is None:
        names = _split_by_host(series, names)
    new = _find_renamed(series, names)
    return [new.get(name, name) for name in names]


def gpus_of(series: Sequence[Series], machines: Sequence[str]) -> list[str | None]:
    """GPU index of each series; None for a series that is not about a GPU.

    A GPU with a UUID keeps one index, the newest, if a reset has renumbered the GPUs of its
    machine. Where indices are missing, the order of the UUIDs gives them.
    """
    newest: dict[tuple[str, str], tuple[float, str]] = {}
    unnumbered: defaultdict[str, set[str]] = defaultdict(set)
    for each, machine in zip(series, machines, strict=True):
        uuid, index = _uuid(each), each.labels.get("gpu")
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
        indices.get((machine, _uuid(each) or ""), each.labels.get("gpu"))
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


def _split_by_host(series: Sequence[Series], names: Sequence[str]) -> list[str]:
    """Machine names by host where multiple hosts share one instance."""
    hosts = [
        each.labels.get("Hostname", each.labels.get("hostname"))
        if _first_label(each.labels, MACHINE_LABELS) == "instance"
        else None
        for each in series
    ]
    hosts_by_name: defaultdict[str, set[str]] = defaultdict(set)
    for name, host in zip(names, hosts, strict=True):
        if host:
            hosts_by_name[name].add(host)
    return [
        host if host and len(hosts_by_name[name]) > 1 else name
        for name, host in zip(names, hosts, strict=True)
    ]


def _find_renamed(series: Sequence[Series], names: Sequence[str]) -> dict[str, str]:
    """The newest name of each machine that had another one before."""
    spans: dict[str, tuple[float, float]] = {}
    names_by_gpu: defaultdict[str, set[str]] = defaultdict(set)
    for each, name in zip(series, names, strict=True):
        if each.times.size:
            first, last = spans.get(name, (np.inf, -np.inf))
            spans[name] = min(first, float(each.times[0])), max(last, float(each.times[-1]))
            uuid = _uuid(each)
            if uuid:
                names_by_gpu[uuid].add(name)
    new: dict[str, str] = {}
    for names_of_gpu in names_by_gpu.values():
        ordered = sorted(names_of_gpu, key=lambda name: spans[name])
        for old, later in pairwise(ordered):
            if spans[old][1] < spans[later][0]:
                new[old] = later
    for old in new:
        while new[old] in new:
            new[old] = new[new[old]]
    return new


def _first_label(labels: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in labels), None)


def _uuid(series: Series) -> str | None:
    return series.labels.get("UUID", series.labels.get("uuid"))


def _format_date(time: float) -> str:
    """A Unix time as a date, or as a number if it is out of the calendar's range."""
    try:
        return datetime.fromtimestamp(time, UTC).strftime("of %Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return f"of the Unix time {time:g}"
