"""Samples of other machines over the network: Prometheus's server, and exporters' own pages.

A Prometheus server is queried for the samples that it has scraped since the last poll; exporters'
own pages are scraped by `Pages`. `Store` keeps the last seconds of either. The answer of Prometheus
is a matrix: one series of ``[Unix time, "value"]`` for each set of labels. A page has a line for
each sample.
https://prometheus.io/docs/instrumenting/exposition_formats/
https://prometheus.io/docs/prometheus/latest/querying/api/#range-queries
"""

import json
import math
import re
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jrl.faults.remote.exporters import SELECTOR, find_metric, is_ignored
from jrl.faults.remote.fetch import Fetcher, Limits
from jrl.faults.remote.machines import ANSWERS, PAGE, machine_of, source_of
from jrl.faults.remote.series import Series

Sample = tuple[Mapping[str, str], float, float]
"""Labels, Unix time and value."""
MAX_CLOCK_AHEAD = 60.0
"""Seconds by which a clock elsewhere may be ahead."""
SERVER_LIMITS = Limits(max_bytes=2**29)
"""Limits of a server's answer with the samples of all machines."""
MAX_WARNING = 300
"""Characters of a server's warnings, for example that a part of its stores did not answer."""
MAX_LINES = 200_000
"""Lines of a page; a node with hundreds of containers has some 50,000."""
MAX_LINE = 2**16
MAX_AGE = 300.0
"""Seconds after which a sample is no longer the current one, as for Prometheus."""
MAX_SHOWN = 80
_NAME = re.compile(r"[a-zA-Z_:][\w:]*", re.ASCII)
_LABEL = re.compile(r'[\s,]*(\w+)\s*=\s*"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_LABELS_BEGIN = re.compile(r"\s*\{")
_LABELS_END = re.compile(r"[\s,]*\}")
_VALUE = re.compile(r"\s*([^\s_]+)(?:\s+(-?\d{1,18}))?\s*(?:#.*)?$")
_ESCAPE = re.compile(r'\\([\\"n])')
"""The escapes of a label's value; any other backslash is one, and a tab may be raw."""
_NO_TEXT = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as `surrogateescape` decodes them."""


def read_series(
    answers: Sequence[str | bytes], *, machine: str | None, requested: Collection[str] = ()
) -> list[Series]:
    """The series of range-query answers, one or several.

    Args:
      answers: the JSON as the server sent it; multiple answers are combined.
      machine: the label whose value is the machine's name, often "instance"; None takes the first
        of `MACHINE_LABELS` that a series has.
      requested: names of exporters that are included although they are unknown.

    Raises:
      ValueError: if an answer is not JSON, truncated, an error or not a matrix; if a series lacks
        its name or that label, or two have the same. A function in the query, such as ``rate``,
        removes the name: put it back there (``label_replace``).
    """
    series_by_key: dict[tuple[str, str, str], Series] = {}
    for answer in answers:
        for labels, samples in read_matrix(answer):
            name = labels.get("__name__")
            if name is None:
                raise ValueError(
                    "a series of the answer has no label '__name__': it has "
                    f"{', '.join(labels) or 'none'}; keep the name in the query."
                )
            # Multiple series of a known exporter's metric are aggregated or ignored; multiple
            # series of a requested name are averaged.
            may_repeat = find_metric(name) or is_ignored(name) or name in requested
            distinct = str(sorted(labels.items())) if may_repeat else ""
            owner = "" if is_ignored(name, requested) else machine_of(labels, machine)
            if (owner, name, distinct) in series_by_key:
                raise ValueError(
                    f"two series are {name} of {owner}: aggregate them in the query, for "
                    f"example sum by ({machine or 'instance'}) (...)."
                )
            ordered = sorted(samples)
            times, values = (np.array([each[field] for each in ordered]) for field in (0, 1))
            series_by_key[owner, name, distinct] = Series(labels, times, values)
    return list(series_by_key.values())


def read_matrix(answer: str | bytes) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Labels and samples of each series."""
    return _matrix(_read_json(answer))


def _read_json(answer: str | bytes) -> dict[str, Any]:
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON, or is truncated: {error}") from None
    return content if isinstance(content, dict) else {}


def _matrix(
    content: Mapping[str, Any],
) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
    if content.get("status") == "error":
        raise ValueError(f"Prometheus answered {content.get('errorType')}: {content.get('error')}")
    data = content.get("data")
    data = data if isinstance(data, dict) else {}
    kind = data.get("resultType")
    if kind != "matrix":
        raise ValueError(f"the answer is a {kind}, not a matrix: ask /api/v1/query_range.")
    if not isinstance(data.get("result"), list):
        raise ValueError("the answer has no list of series: it is not as Prometheus writes it.")
    for entry in data["result"]:
        try:
            samples = [(float(time), float(value)) for time, value in entry["values"]]
            labels = {str(name): str(value) for name, value in entry["metric"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"a series of the answer is not as Prometheus writes it: {error!r}"
            ) from None
        if not all(math.isfinite(time) for time, _ in samples):
            raise ValueError(f"a series of the answer has a time that is not a number: {labels}")
        # Prometheus writes "NaN", "+Inf" and "-Inf"; none is a measurement.
        yield labels, [(t, v if math.isfinite(v) else math.nan) for t, v in samples]


@runtime_checkable
class SampleSource(Protocol):
    """Source of samples that can be polled."""

    def poll(self, since: float, now: float) -> tuple[list[Sample], list[str]]:
        """At least the samples after `since`, older ones too (`Store` drops what it has), and one
        line per problem."""
        ...


class Store:
    """Store of the series of the last `seconds`, extended by polling a source for newer samples."""

    def __init__(self, source: SampleSource, seconds: float | int):
        self._source, self._seconds = source, float(seconds)
        self._series: dict[tuple[tuple[str, str], ...], tuple[list[float], list[float]]] = {}
        self._newest = -math.inf

    def update(self, now: float) -> tuple[list[Series], list[str]]:
        """Polls for new samples; returns all series that have samples, and a line per problem."""
        since = max(self._newest, now - self._seconds)
        samples, problems = self._source.poll(since, now)
        ahead = [labels for labels, time, _ in samples if time > now + MAX_CLOCK_AHEAD]
        if ahead:
            # They would remain the newest samples for as long as that clock is ahead.
            samples = [sample for sample in samples if sample[1] <= now + MAX_CLOCK_AHEAD]
            first = ahead[0].get("__name__", "a metric")
            problems.append(
                f"samples are more than {MAX_CLOCK_AHEAD:.0f} s ahead of this clock, such as "
                f"{first} of {source_of(ahead[0])!r}: left out; set that clock right."
            )
        for labels, time, value in sorted(samples, key=lambda sample: sample[1]):
            times, values = self._series.setdefault(tuple(sorted(labels.items())), ([], []))
            if not times or time > times[-1]:
                times.append(time)
                values.append(value)
                self._newest = max(self._newest, time)
        for times, values in self._series.values():
            old = int(np.searchsorted(times, now - self._seconds))
            del times[:old], values[:old]
        self._series = {key: each for key, each in self._series.items() if each[0]}
        series = self._series.items()
        return [Series(dict(k), np.array(t), np.array(v)) for k, (t, v) in series], problems


class Prometheus:
    """Prometheus server, queried for raw samples with the times at which they were scraped.

    An instant query of a range vector (``selector[1800s]``) returns these; ``query_range`` would
    resample them at every step.

    Args:
      server: its address, such as ``http://localhost:9090``.
      selector: the series, in PromQL; by default all known names.
      limits: of an answer.

    Raises:
      ValueError: for an address without http:// or https://.
    """

    def __init__(self, server: str, selector: str = SELECTOR, limits: Limits = SERVER_LIMITS):
        check_address("server", server)
        self._server, self._selector = server.rstrip("/"), selector
        self._fetcher = Fetcher(limits)

    def poll(self, since: float, now: float) -> tuple[list[Sample], list[str]]:
        # The query overlaps the last one by a minute, as a server may ingest samples late.
        seconds = max(1, math.ceil(now - since) + 60)
        query = f"{self._selector}[{seconds}s]"
        fields = urllib.parse.urlencode({"query": query, "time": f"{now:.3f}"})
        (answer,) = self._fetcher.fetch([f"{self._server}/api/v1/query?{fields}"])
        if isinstance(answer, str):
            return [], [answer]
        try:
            content = _read_json(answer)
            series = list(_matrix(content))
        except ValueError as error:
            return [], [f"{self._server}: {error}"]
        warnings = content.get("warnings")
        problems = [f"{self._server} warns: {warnings}"[:MAX_WARNING]] if warnings else []
        return [(labels, t, v) for labels, samples in series for t, v in samples], problems


def check_address(name: str, address: str) -> None:
    """Raises a ValueError for an address without http:// or https://."""
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{name}={address!r} must begin with http:// or https://.")


# A time in milliseconds may follow the value, and an exemplar.


@dataclass
class Page:
    """Content of a page.

    Attributes:
      samples: labels, value, and Unix time if the page gives one.
      unreadable: lines that are no samples, the first in the front.
    """

    samples: list[tuple[dict[str, str], float, float | None]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


class Pages:
    """Exporters' pages, scraped at each poll.

    A sample has the time of the poll, or the page's if it is not older than `MAX_AGE`.

    Args:
      addresses: of the pages, at least one, such as ``http://node7:9400/metrics``. A series without
        the label ``instance`` gets the address's host and port as one.
      limits: of each page.

    Raises:
      ValueError: if there is no address, or one lacks http:// or https://.
    """

    def __init__(self, addresses: Sequence[str], limits: Limits | None = None):
        if not addresses:
            raise ValueError("scrape=() must have a page's address: http://node7:9400/metrics.")
        for address in addresses:
            check_address("scrape", address)
        self._addresses = tuple(dict.fromkeys(addresses))
        self._fetcher = Fetcher(limits or Limits())

    def poll(self, since: float, now: float) -> tuple[list[Sample], list[str]]:
        """The pages' samples, and for each page whether it was read, as `ANSWERS`."""
        del since  # a page has current values only
        samples: list[Sample] = []
        problems: list[str] = []
        for address, body in zip(
            self._addresses, self._fetcher.fetch(self._addresses), strict=True
        ):
            instance = urllib.parse.urlsplit(address).netloc.rpartition("@")[2]
            page_samples, page_problems = _read(address, instance, body, now)
            answers = {"__name__": ANSWERS, "instance": instance, PAGE: address}
            samples += [*page_samples, (answers, now, float(bool(page_samples)))]
            problems += page_problems
        return samples, problems


def _read(
    address: str, instance: str, body: bytes | str, now: float
) -> tuple[list[Sample], list[str]]:
    """Samples of a page, and a line for each thing that is wrong with it."""
    if isinstance(body, str):
        return [], [body]
    if body.count(b"\n") > MAX_LINES:
        return [], [f"{address} has more than {MAX_LINES} lines: left out"]
    if not body.endswith(b"\n"):
        return [], [f"{address} is cut or is no page of metrics: its last line has no end"]
    page = read_page(body.decode(errors="surrogateescape"))
    problems: list[str] = []
    if page.unreadable:
        shown = page.unreadable[0][:MAX_SHOWN].encode(errors="replace").decode()
        problems.append(f"{address} has lines that are no metrics, such as {shown!r}: left out")
    samples: list[Sample] = [
        ({"instance": instance, **labels}, now if time is None else time, value)
        for labels, value, time in page.samples
    ]
    current = [each for each in samples if -MAX_CLOCK_AHEAD <= now - each[1] <= MAX_AGE]
    if len(current) < len(samples):
        problems.append(
            f"{address} has metrics with times that are more than {MAX_AGE:.0f} s old or "
            f"{MAX_CLOCK_AHEAD:.0f} s ahead: left out; set its clock right, or restart it"
        )
    if not page.samples:
        problems.append(f"{address} has no metrics")
    return current, problems


def read_page(text: str) -> Page:
    """Reads a page. Comments and empty lines are skipped."""
    page = Page()
    for line in text.split("\n"):
        if line.startswith("#") or not line.strip():
            continue
        sample = _read_line(line) if len(line) <= MAX_LINE else None
        if sample is None:
            page.unreadable.append(line)
        else:
            page.samples.append(sample)
    return page


def _read_line(line: str) -> tuple[dict[str, str], float, float | None] | None:
    """The sample of a line, None if it is none."""
    name = _NAME.match(line)
    if name is None or _NO_TEXT.search(line):
        return None
    labels, end = {"__name__": name[0]}, name.end()
    opening = _LABELS_BEGIN.match(line, end)
    if opening is not None:
        end = opening.end()
        for match in _labels(line, end):
            labels[match[1]] = _unescape(match[2])
            end = match.end()
        closing = _LABELS_END.match(line, end)
        if closing is None:
            return None
        end = closing.end()
    elif not line[end : end + 1].isspace():
        return None
    match = _VALUE.match(line, end)
    if match is None:
        return None
    try:
        value = float(match[1])
    except ValueError:
        return None
    time = None if match[2] is None else int(match[2]) / 1000
    return labels, value if math.isfinite(value) else math.nan, time


def _labels(line: str, start: int) -> Iterator[re.Match[str]]:
    """Labels that follow one another from a position on."""
    while match := _LABEL.match(line, start):
        yield match
        start = match.end()


def _unescape(raw: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], raw)
