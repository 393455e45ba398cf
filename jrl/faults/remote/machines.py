"""Machine of each series of exporters: its name, and the joining of several names of one machine.

Exporters of one machine may give it different names. In Kubernetes DCGM's exporter has the address
of its pod and the label ``Hostname=gpu-node-6``, cAdvisor the address of the node and
``node=gpu-node-6``, and node exporter the address of the node alone. A name that two of them share
joins them, and the node names the machine.
"""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np

from jrl.faults.remote.series import Series, device_of, uuid_of

ANSWERS = "up"
"""Metric that is 1 if an exporter was read and 0 if not, as a Prometheus server records it."""
PAGE = "page"
"""Label of `ANSWERS` with the address of a page that no server read."""
IDENTITY = "node_uname_info"
"""Metric of node exporter whose label ``nodename`` is the name of its machine."""
MACHINE_LABELS = ("machine", "node", "instance", "Hostname", "hostname")
"""Labels that name a machine, in order of preference; the port of an instance is left out."""
HOSTS = ("node", "nodename", "Hostname", "hostname")
"""Labels with the name of a host. Series that share one are joined."""
MAX_NAMED = 3
MAX_CACHED = 2**16
"""Names whose parts are cached, as the names of all machines recur in every pass."""

_EXPORTERS = re.compile(r"(DCGM|node|container)_")


def machine_of(labels: Mapping[str, str], label: str | None = None) -> str:
    """The machine that labels are about.

    Raises:
      ValueError: if none of them names one.
    """
    names = MACHINE_LABELS if label is None else (label,)
    name = _first_label(labels, names)
    if name is None:
        raise ValueError(
            f"a series of the answer has no label {' or '.join(map(repr, names))}: it has "
            f"{', '.join(labels) or 'none'}; choose another, or keep it in the query."
        )
    return _host_of(labels[name]) if label is None and name == "instance" else labels[name]


def source_of(labels: Mapping[str, str]) -> str:
    """Source of labels, for a message: a machine, or all labels if they name none."""
    try:
        return machine_of(labels)
    except ValueError:
        return str(dict(labels))


def machines_of(series: Sequence[Series], label: str | None = None) -> list[str]:
    """Machine of each series, determined from all series together.

    * Multiple hosts that are scraped through one address (one ``instance``, multiple ``Hostname``)
      are multiple machines.
    * Addresses and hosts that share a name are one machine, called by its node. They are not joined
      if both have the same metric of the same device at one time, as two machines that are both
      called ``localhost``.
    * A machine that comes back under another address with a GPU of the same UUID, after everything
      under the old one has ended, is the same machine under its new name.

    Args:
      label: names the machine, which turns the first two off; by default the first of
        `MACHINE_LABELS` that a series has.

    Raises:
      ValueError: if a series names no machine.
    """
    names = [machine_of(each.labels, label) for each in series]
    if label is None:
        split = _split_by_host(series, names)
        joined = _join(series, names, split)
        names = [joined.get(name, name) for name in split]
    new = _find_renamed(series, names)
    return [new.get(name, name) for name in names]


def describe_unjoined(series: Iterable[Series], machines: Iterable[str]) -> list[str]:
    """A line for each two exporters that both have machines which the other lacks.

    They are probably the same machines, whose names cannot be joined.
    """
    machines_of_exporter: defaultdict[str, set[str]] = defaultdict(set)
    for each, machine in zip(series, machines, strict=True):
        match = _EXPORTERS.match(each.labels["__name__"])
        if match is not None:
            machines_of_exporter[match[1]].add(machine)
    lines = []
    for (one, of_one), (other, of_other) in combinations(sorted(machines_of_exporter.items()), 2):
        if of_one - of_other and of_other - of_one:
            lacking = f"{list_some(of_one - of_other)}; {list_some(of_other - of_one)}"
            lines.append(
                f"metrics {one}_* and {other}_* are of other machines ({lacking}): if these are "
                "the same ones, give both a label node in the scrape configuration."
            )
    return lines


def list_some(names: Collection[str]) -> str:
    """The first of some names, and their number if there are more."""
    shown = ", ".join(sorted(names)[:MAX_NAMED])
    return shown + (f", ... {len(names)} in all" if len(names) > MAX_NAMED else "")


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


@dataclass
class _Group:
    """Names of one machine.

    Attributes:
      names: at least one.
      nodes, nodenames: values of these labels.
      spans: first and last time, and the UUID of the GPU, by metric and device.
      joined_by: what the names share; None for one name.
    """

    names: list[str]
    nodes: set[str] = field(default_factory=set)
    nodenames: set[str] = field(default_factory=set)
    spans: dict[tuple[str, ...], list[tuple[float, float, str | None]]] = field(
        default_factory=dict
    )
    joined_by: str | None = None

    def is_other(self, other: "_Group") -> bool:
        """True if two groups cannot be one machine."""
        nodes, other_nodes = ({*map(_short, each.nodes)} for each in (self, other))
        if nodes and other_nodes and nodes != other_nodes:
            return True
        return any(
            begin <= last and first <= end and not (uuid is not None and uuid == other_uuid)
            for key in self.spans.keys() & other.spans.keys()
            for first, last, uuid in self.spans[key]
            for begin, end, other_uuid in other.spans[key]
        )

    def merge(self, other: "_Group", shared: str) -> None:
        self.joined_by = self.joined_by or shared
        self.names += other.names
        self.nodes |= other.nodes
        self.nodenames |= other.nodenames
        for key, spans in other.spans.items():
            self.spans.setdefault(key, []).extend(spans)


def _join(
    series: Sequence[Series], addresses: Sequence[str], names: Sequence[str]
) -> dict[str, str]:
    """New names of machines that have several, or whose node is known.

    Args:
      addresses: the names before hosts behind one address were split.
      names: the names after it.
    """
    groups: dict[str, _Group] = {}
    names_of_alias: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for each, address, name in zip(series, addresses, names, strict=True):
        labels = each.labels
        if "machine" in labels:  # the name of a process, several of which may share a host
            continue
        group = groups.setdefault(name, _Group([name]))
        hosts = {key: labels[key] for key in HOSTS if labels.get(key)}
        group.nodes |= {hosts[key] for key in hosts if key == "node"}
        group.nodenames |= {hosts[key] for key in hosts if key == "nodename"}
        if each.times.size and labels["__name__"] not in (ANSWERS, IDENTITY):
            span = float(each.times[0]), float(each.times[-1]), uuid_of(each)
            group.spans.setdefault(device_of(labels), []).append(span)
        aliases = [*hosts.values()]
        if address == name and "instance" in labels:
            aliases.append(_host_of(labels["instance"]))
        for alias in aliases:
            if not _is_loopback(alias):
                names_of_alias[_short(alias)].setdefault(name, alias)
    ambiguous = set()
    for alias, spelling in names_of_alias.items():
        same = list({id(groups[name]): groups[name] for name in spelling}.values())
        if any(one.is_other(another) for one, another in combinations(same, 2)):
            ambiguous.add(alias)
            continue
        for other in same[1:]:
            same[0].merge(other, next(iter(spelling.values())))
            groups |= dict.fromkeys(other.names, same[0])
    return {name: _best_name(name, group, ambiguous) for name, group in groups.items()}


def _best_name(name: str, group: _Group, ambiguous: set[str]) -> str:
    """Name of a machine: its node's, else the one that joined its names."""
    nodenames = [each for each in group.nodenames if _short(each) not in ambiguous]
    nodenames = [each for each in nodenames if not _is_loopback(each)]
    return min(group.nodes or nodenames or [group.joined_by or name])


def _find_renamed(series: Sequence[Series], names: Sequence[str]) -> dict[str, str]:
    """The newest name of each machine that had another one before."""
    spans: dict[str, tuple[float, float]] = {}
    names_by_gpu: defaultdict[str, set[str]] = defaultdict(set)
    for each, name in zip(series, names, strict=True):
        if each.times.size:
            first, last = spans.get(name, (np.inf, -np.inf))
            spans[name] = min(first, float(each.times[0])), max(last, float(each.times[-1]))
            uuid = uuid_of(each)
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


@lru_cache(MAX_CACHED)
def _host_of(instance: str) -> str:
    """An instance without its port."""
    return re.sub(r":\d+$", "", instance)


@lru_cache(MAX_CACHED)
def _short(name: str) -> str:
    """A host's name without its domain, in lower case; an address as it is."""
    name = name.lower().rstrip(".")
    return name if _is_address(name) else name.partition(".")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


@lru_cache(MAX_CACHED)
def _is_loopback(name: str) -> bool:
    """True for a name that every machine has for itself."""
    name = name.lower().strip("[]")
    return name.startswith(("localhost", "127.")) or name in ("::1", "0.0.0.0", "")
