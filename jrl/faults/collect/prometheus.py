"""Samples of other machines over the network: Prometheus's answers, its server, exporters' pages.

Either a Prometheus server is queried for the samples that it has scraped since the last poll, or
the exporters' pages are scraped directly; `Store` keeps the last seconds. The answer of Prometheus
is a matrix: one series of ``[Unix time, "value"]`` for each set of labels.
https://prometheus.io/docs/prometheus/latest/querying/api/#range-queries
"""

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np

from jrl.faults.collect.exporters import SELECTOR, find_metric, is_ignored
from jrl.faults.collect.series import Series, machine_of

Sample = tuple[Mapping[str, str], float, float]
"""Labels, Unix time and value."""
TIMEOUT = 10.0
"""Timeout of an answer, in seconds."""
MAX_CLOCK_AHEAD = 60.0
"""Seconds by which a clock elsewhere may be ahead."""
MAX_CONCURRENT = 16
"""Pages that are fetched concurrently."""
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r'\\([\\"n])')
"""The escapes of a label's value; any other backslash is one, and a tab may be raw."""


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
      ValueError: where an answer is not JSON, truncated, an error or not a matrix; where a series
        lacks its name or that label, or two have the same. A function in the query, such as
        ``rate``, removes the name: put it back there (``label_replace``).
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
            # Multiple series of a known exporter's metric are aggregated or ignored; those of a
            # requested name are averaged.
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
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer is not JSON, or is truncated: {error}") from None
    content = content if isinstance(content, dict) else {}
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
                f"{len(ahead)} samples are more than {MAX_CLOCK_AHEAD:.0f} s ahead of this clock, "
                f"such as {first} of {machine_of(ahead[0])!r}: left out; set that clock right."
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

    Raises:
      ValueError: for an address without http:// or https://.
    """

    def __init__(self, server: str, selector: str = SELECTOR):
        check_address("server", server)
        self._server, self._selector = server.rstrip("/"), selector

    def poll(self, since: float, now: float) -> tuple[list[Sample], list[str]]:
        # The query overlaps the last one by a minute, as a server may ingest samples late.
        seconds = max(1, math.ceil(now - since) + 60)
        query = f"{self._selector}[{seconds}s]"
        fields = urllib.parse.urlencode({"query": query, "time": f"{now:.3f}"})
        try:
            answer = fetch(f"{self._server}/api/v1/query?{fields}")
            series = list(read_matrix(answer))
        except ValueError as error:
            return [], [str(error)]
        return [(labels, t, v) for labels, samples in series for t, v in samples], []


class Pages:
    """Exporters' own pages, scraped at each poll.

    Samples get the time of the poll; timestamps on a page are ignored.

    Args:
      addresses: of the pages, at least one, such as ``http://node7:9400/metrics``. A series without
        the label ``instance`` gets the address's host and port as one.

    Raises:
      ValueError: without an address, and for one without http:// or https://.
    """

    def __init__(self, addresses: Sequence[str]):
        if not addresses:
            raise ValueError("scrape=() must have a page's address: http://node7:9400/metrics.")
        for address in addresses:
            check_address("scrape", address)
        self._addresses = tuple(addresses)

    def poll(self, since: float, now: float) -> tuple[list[Sample], list[str]]:
        del since  # a page has current values only
        with ThreadPoolExecutor(min(MAX_CONCURRENT, len(self._addresses))) as pool:
            pages = list(pool.map(partial(_scrape, now=now), self._addresses))
        samples = [sample for page_samples, _ in pages for sample in page_samples]
        return samples, [problem for _, problems in pages for problem in problems]


def _scrape(address: str, now: float) -> tuple[list[Sample], list[str]]:
    """Samples of a page, and a line if it cannot be fetched."""
    try:
        text = fetch(address).decode(errors="replace")
    except ValueError as error:
        return [], [str(error)]
    host = urllib.parse.urlsplit(address).netloc
    return [({"instance": host, **labels}, now, value) for labels, value in read_page(text)], []


def fetch(address: str, timeout: float | int = TIMEOUT) -> bytes:
    """Body of the response to a GET request.

    Raises:
      ValueError: where the address cannot be reached or answers with an error status.
    """
    location = "{0.scheme}://{0.netloc}{0.path}".format(urllib.parse.urlsplit(address))
    try:
        with urllib.request.urlopen(address, timeout=timeout) as response:
            return response.read()
    except urllib.error.HTTPError as error:  # a refusal has the reason in its body
        reason = error.read().decode(errors="replace")[:200]
        raise ValueError(f"{location} answered {error.code}: {reason}") from None
    except OSError as error:
        raise ValueError(f"{location} cannot be reached: {error}") from None


def check_address(name: str, address: str) -> None:
    """Raises a ValueError for an address without http:// or https://."""
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"{name}={address!r} must begin with http:// or https://.")


def read_page(text: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and values of an exporter's page in the text format; other lines are left out.

    https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match is None or line.startswith("#"):
            continue
        name, labels, value_text = match.groups()
        try:
            value = float(value_text)
        except ValueError:
            continue
        pairs = {key: _unescape(raw) for key, raw in _LABEL.findall(labels or "")}
        yield {"__name__": name, **pairs}, value if math.isfinite(value) else math.nan


def _unescape(raw: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], raw)
