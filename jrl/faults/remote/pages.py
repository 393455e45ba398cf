"""Exporters' own pages, in Prometheus's text format.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jrl.faults.remote.fetch import Fetcher, Limits
from jrl.faults.remote.machines import ANSWERS, PAGE
from jrl.faults.remote.prometheus import MAX_CLOCK_AHEAD, Sample, check_address

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
# A time in milliseconds may follow the value, and an exemplar.
_VALUE = re.compile(r"\s*([^\s_]+)(?:\s+(-?\d{1,18}))?\s*(?:#.*)?$")
_ESCAPE = re.compile(r'\\([\\"n])')
"""The escapes of a label's value; any other backslash is one, and a tab may be raw."""
_NO_TEXT = re.compile("[\udc80-\udcff]")
"""Bytes that are not UTF-8, as `surrogateescape` decodes them."""


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

    A sample has the time of the poll, or that of the page if it is not older than `MAX_AGE`.

    Args:
      addresses: of the pages, at least one, such as ``http://node7:9400/metrics``. A series without
        the label ``instance`` gets the address's host and port as one.
      limits: of each page.

    Raises:
      ValueError: without an address, and for one without http:// or https://.
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
