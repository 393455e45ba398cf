"""Prometheus client and exporter: reads query answers as fleets, serves samples to be scraped.

The answer to ``GET /api/v1/query_range`` is a matrix: one series of ``[Unix time, "value"]`` for
each set of labels. https://prometheus.io/docs/prometheus/latest/querying/api/#range-queries
"""

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jrl.faults.collect.exporters import build_fleet, find_metric, is_ignored
from jrl.faults.collect.fleet import Fleet
from jrl.faults.collect.series import Series, machine_of
from jrl.faults.collect.vocabulary import exported_name

Latest = Callable[[], tuple[float, Mapping[str, float]]]
"""Unix time and metrics of the newest sample; time 0 where there is none yet."""


def read_answers(
    answers: Sequence[str | bytes],
    *,
    machine: str | None = "machine",
    metric: str = "__name__",
    period: float | int | None = 1.0,
    requested: Collection[str] = (),
) -> Fleet:
    """Range-query answers, one or several, as one fleet; see `build_fleet` for what is left out.

    Args:
      answers: the JSON as the server sent it; multiple answers are combined.
      machine: the label whose value is the machine's name, often "instance"; None takes the first
        of `MACHINE_LABELS` that a series has.
      metric: the label whose value is the metric's name. A function in the query, such as ``rate``,
        removes ``__name__``: put the name under another label there (``label_replace``).
      period: the ``step`` of the query, in seconds; None takes the usual gap in the answers.
      requested: names of exporters that are included although they are unknown.

    Raises:
      ValueError: where an answer is not JSON, truncated, an error or not a matrix; where a series
        lacks one of the labels, or two have the same; where a value is not a number, or times are
        days apart.
    """
    if period is not None and not (math.isfinite(period) and period > 0):
        raise ValueError(f"period={period} must be a finite number of seconds above 0.")
    series = read_series(answers, machine=machine, metric=metric, requested=requested)
    return build_fleet(series, label=machine, period=period, requested=requested)


def read_series(
    answers: Sequence[str | bytes],
    *,
    machine: str | None,
    metric: str = "__name__",
    requested: Collection[str] = (),
) -> list[Series]:
    """The series of range-query answers; arguments and errors are those of `read_answers`."""
    series_by_key: dict[tuple[str, str, str], Series] = {}
    for answer in answers:
        for labels, samples in read_matrix(answer):
            name = labels.get(metric)
            if name is None:
                raise ValueError(
                    f"a series of the answer has no label {metric!r}: it has "
                    f"{', '.join(labels) or 'none'}; choose another, or keep it in the query."
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
            series_by_key[owner, name, distinct] = Series(
                {**labels, "__name__": name}, times, values
            )
    return list(series_by_key.values())


def query_range(
    server: str,
    query: str,
    start: float | int,
    end: float | int,
    period: float | int = 1.0,
    timeout: float | int = 30.0,
) -> bytes:
    """Queries a Prometheus server for values between two Unix times.

    Args:
      server: its address, such as ``http://localhost:9090``.

    Raises:
      ValueError: where it cannot be reached or rejects the query.
    """
    fields = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": period})
    if not server.startswith(("http://", "https://")):
        raise ValueError(f"server={server!r} must begin with http:// or https://.")
    address = f"{server.rstrip('/')}/api/v1/query_range?{fields}"
    try:
        with urllib.request.urlopen(address, timeout=timeout) as response:
            return response.read()
    except urllib.error.HTTPError as error:  # a refusal has the reason in its body
        reason = error.read().decode(errors="replace")[:200]
        raise ValueError(f"{server} refused the query {query!r}: {reason}") from None
    except (urllib.error.URLError, TimeoutError) as error:
        raise ValueError(f"{server} cannot be reached: {error}") from None


class Exporter:
    """Serves the newest sample of a process to Prometheus, on ``http://HOST:PORT/metrics``.

    A metric such as ``step/time`` is called ``jrl_step_time`` there and has the label ``machine``.
    A server that scrapes once a second gets all samples of the record.

    Args:
      latest: `Sampler.latest` as a function.
      machine: the value of the label.
      port: 0 takes any free port.
      address: of the interface to listen on; only this host by default.

    Attributes:
      port: the port it listens on.

    Raises:
      ValueError: where prometheus-client is not installed, or the port is not available.
    """

    def __init__(self, latest: Latest, machine: str, port: int, address: str = "127.0.0.1"):
        module = import_client()
        registry = module.CollectorRegistry()
        registry.register(_Collector(module, latest, machine))
        try:
            self._server, self._thread = module.start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise ValueError(f"port={port} on {address} is not available: {error}") from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Collector:
    """Collector that prometheus-client calls at each scrape."""

    def __init__(self, module: ModuleType, latest: Latest, machine: str):
        self._module, self._latest, self._machine = module, latest, machine

    def collect(self) -> Iterator[Any]:
        _, values = self._latest()
        for name, value in values.items():
            gauge = self._module.core.GaugeMetricFamily(
                exported_name(name), f"{name} of a training process", labels=["machine"]
            )
            gauge.add_metric([self._machine], value)
            yield gauge


def import_client() -> ModuleType:
    """The package that serves metrics.

    Raises:
      ValueError: where it is not installed.
    """
    try:
        import prometheus_client.core
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        raise ValueError(
            'an exporter needs the package prometheus-client: pip install -e ".[faults]".'
        ) from None
    return prometheus_client


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
    if not isinstance(data, dict) or data.get("resultType") != "matrix":
        kind = data.get("resultType") if isinstance(data, dict) else None
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
