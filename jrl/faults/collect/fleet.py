"""Input and output of a detector: the metrics of all machines on one clock, alarms, reports.

`align` puts the records of multiple processes, each with its own clock, on one clock. Ticks are
whole seconds. A sample belongs to the tick nearest to its time, in whatever order samples were
written; of multiple samples at one tick the last written counts. A tick that has no sample is NaN:
the detector fills gaps. Processes that cannot be compared are left out and reported.
"""

import io
import math
import os
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float64, Int

from jrl.faults.collect.record import Record
from jrl.faults.collect.vocabulary import mask_valid

FLEET_VERSION = 1
NO_MACHINE = -1
"""Row index for no machine."""
INCOMPARABLE = 4
"""Exit status if nothing could be compared, so that the absence of alarms means nothing."""
MAX_AGE = 10.0
"""Seconds after a machine's newest sample from which on it is not compared."""
MAX_AHEAD = 5.0
"""Seconds by which samples may be ahead: later ones are of a wrong clock, and left out."""


@dataclass(frozen=True)
class Fleet:
    """Recorded metrics of a set of machines on one clock.

    Attributes:
      machines: one name per row, all different.
      metrics: one name per column, all different.
      start: Unix time of column 0 of the time axis, in seconds.
      period: seconds between two samples.
      values: ``[machine, metric, time]`` in each metric's own unit; NaN is "no sample".
      blank: (machine, metric) pairs whose exporter reported at times that it has no value: a gap in
        the values, but no silence.

    Raises:
      ValueError: where names repeat, shapes disagree or times cannot be.
    """

    machines: tuple[str, ...]
    metrics: tuple[str, ...]
    start: float | int
    period: float | int = 1.0
    values: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    blank: frozenset[tuple[str, str]] = frozenset()

    def __post_init__(self):
        for name in ("machines", "metrics"):
            names = getattr(self, name)
            twice = sorted(entry for entry, count in Counter(names).items() if count > 1)
            if twice:
                raise ValueError(f"{name}: {twice[0]!r} occurs twice: names must be unique.")
        shape = (len(self.machines), len(self.metrics))
        if self.values.ndim != 3 or self.values.shape[:2] != shape:
            raise ValueError(
                f"values has shape {self.values.shape}, which must be [machine, metric, time] = "
                f"[{shape[0]}, {shape[1]}, time]: one row per name."
            )
        if self.values.dtype != np.float32:
            raise ValueError(f"values has dtype {self.values.dtype}, which must be float32.")
        if not math.isfinite(self.start):
            raise ValueError(f"start={self.start} must be a finite Unix time in seconds.")
        if not (math.isfinite(self.period) and self.period > 0):
            raise ValueError(f"period={self.period} must be a finite number of seconds above 0.")

    @property
    def num_samples(self) -> int:
        """Length of the time axis."""
        return self.values.shape[2]

    @property
    def end(self) -> float:
        """Unix time just after the last sample, in seconds."""
        return self.start + self.num_samples * self.period

    @property
    def times(self) -> Float64[np.ndarray, "time"]:
        """Unix time of each sample, in seconds."""
        return self.start + self.period * np.arange(self.num_samples)

    def select(self, metrics: Sequence[str]) -> "Fleet":
        """The same fleet with these metrics only, in this order.

        Raises:
          ValueError: on a metric that was not recorded.
        """
        missing = [name for name in metrics if name not in self.metrics]
        if missing:
            raise ValueError(
                f"metric {missing[0]!r} was not recorded: choose among {', '.join(self.metrics)}."
            )
        columns = [self.metrics.index(name) for name in metrics]
        return replace(self, metrics=tuple(metrics), values=self.values[:, columns])

    def last(self, seconds: float | int) -> "Fleet":
        """The same fleet over its last `seconds` only."""
        first = max(0, self.num_samples - math.ceil(seconds / self.period))
        start = self.start + first * self.period
        return replace(self, start=start, values=self.values[:, :, first:])

    def save(self, path: Path | str) -> None:
        """Writes the fleet as one ``.npz`` file, atomically."""
        content = io.BytesIO()
        np.savez_compressed(
            content,
            version=np.int64(FLEET_VERSION),
            machines=np.array(self.machines, np.str_),
            metrics=np.array(self.metrics, np.str_),
            start=np.float64(self.start),
            period=np.float64(self.period),
            values=self.values,
            blank=np.array(sorted(self.blank), np.str_).reshape(-1, 2),
        )
        path = Path(path)
        partial = path.with_name(path.name + ".tmp")
        partial.write_bytes(content.getvalue())
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path | str) -> "Fleet":
        """Reads a file that `save` wrote.

        Raises:
          ValueError: if the file is damaged, truncated or something else.
          OSError: if it cannot be read.
        """
        content = Path(path).read_bytes()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                version = int(file["version"])
                arrays = {name: file[name] for name in ("machines", "metrics", "values")}
                start, period = float(file["start"]), float(file["period"])
                # Older files have none.
                blank_pairs = file["blank"].tolist() if "blank" in file.files else []
                blank = frozenset((str(machine), str(metric)) for machine, metric in blank_pairs)
        # All that numpy, zipfile and zlib raise for content that is damaged.
        except (
            ValueError,
            KeyError,
            EOFError,
            TypeError,
            AttributeError,
            OSError,
            RuntimeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as e:
            raise ValueError(
                f"{path} is not a recorded fleet, or is damaged ({type(e).__name__}): give a file "
                "that Fleet.save wrote."
            ) from None
        if version != FLEET_VERSION:
            raise ValueError(f"{path} has version {version}; this program reads {FLEET_VERSION}.")
        machines, metrics = (
            tuple(str(name) for name in arrays[key]) for key in ("machines", "metrics")
        )
        return cls(machines, metrics, start, period, arrays["values"], blank)


@dataclass(frozen=True)
class Alarm:
    """Alarm about one machine that has been an outlier for too long.

    Attributes:
      machine: its name in the fleet.
      metric: the metric in which it is an outlier.
      start: Unix time at which it became an outlier, in seconds.
      end: Unix time of the last examined sample in which it was one.
      evidence: numbers behind it, by name: scores over time, thresholds, counts.
      cause: the cause that the machine itself reports, in words; empty if it reports none.
    """

    machine: str
    metric: str
    start: float | int
    end: float | int
    evidence: dict[str, np.ndarray | float | int] = field(default_factory=dict, compare=False)
    cause: str = field(default="", compare=False)

    def describe(self) -> str:
        """One line: machine, metric, start and duration."""
        since = datetime.fromtimestamp(self.start, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        figures = ", ".join(
            f"{name} {value:.3g}"
            for name, value in self.evidence.items()
            if isinstance(value, float | int)
        )
        cause = f" with {self.cause}" if self.cause else ""
        line = f"{self.machine} stands out in {self.metric}{cause} since {since}"
        line += f", for {self.end - self.start:.0f} s"
        return f"{line} ({figures})" if figures else line


Detector = Callable[[Fleet], list[Alarm]]
"""Names the outlier machines, the most certain first; an empty list if there is none."""


@dataclass(frozen=True)
class Trace:
    """The machine farthest from the others over time, in one metric.

    Attributes:
      times: Unix time of each moment, in seconds.
      scores: the greatest score of any machine; NaN if none was computed.
      leader: row of the machine that has it, or `NO_MACHINE` below the threshold.
      threshold: score from which a machine is an outlier.
    """

    times: Float[np.ndarray, "moment"]
    scores: Float[np.ndarray, "moment"]
    leader: Int[np.ndarray, "moment"]
    threshold: float | int


@dataclass(frozen=True)
class Report:
    """Alarms of a detection pass and the scores behind them.

    Attributes:
      alarms: the outlier machines, the most certain first.
      notes: what could not be compared and why, one line each.
      comparable: true if anything was compared; without alarms, false means "nothing is known".
      machines: names of the rows of `traces`.
      traces: by metric, in the order of the search.
    """

    alarms: list[Alarm]
    notes: tuple[str, ...] = ()
    comparable: bool = True
    machines: tuple[str, ...] = ()
    traces: Mapping[str, Trace] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """State of one process.

    Attributes:
      machine, host: its name, and its host's.
      state: "running", "silent" (no new sample, or a clock that is behind), "ended", "no data" or
        "clock ahead"; only the running are compared.
      age: seconds from its newest sample to the end of the fleet; negative for a clock that is
        ahead, NaN if it has no sample.
      damaged: rows its files lost to a wrong checksum.
      torn: bytes at the end of its files that are not a full row.
      future: samples left out because they are ahead of the fleet's clock.
    """

    machine: str
    host: str
    state: str
    age: float | int
    damaged: int
    torn: int
    future: int


@dataclass(frozen=True)
class Aligned:
    """Aligned records.

    Attributes:
      fleet: the processes that are running, on one clock.
      processes: all of them, in the order of their names.
    """

    fleet: Fleet
    processes: tuple[Process, ...]


def align(
    records: Iterable[Record], *, now: float | int | None = None, seconds: float | int = 900.0
) -> Aligned:
    """Aligns records on one clock.

    Args:
      records: a restarted process has multiple records under one machine.
      now: Unix time of the end; None takes the median of the machines' newest samples, which no
        single wrong clock can move far.
      seconds: how far back to look.

    Returns:
      The fleet of the running machines. Its metrics are those that any of them has.

    Raises:
      ValueError: for `seconds` that are not finite and above 0.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds={seconds} must be a finite number of seconds above 0.")
    records_by_machine: defaultdict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: (record.machine, record.begun)):
        records_by_machine[record.machine].append(record)
    if now is None:
        newest = [_newest(each) for each in records_by_machine.values()]
        times = [time for time in newest if math.isfinite(time)]
        now = float(np.median(times)) if times else 0.0
    # The grid ends at the tick nearest to the latest sample that counts.
    start = float(math.floor(now) - math.ceil(seconds) + 1)
    processes = tuple(_process_state(each, now) for each in records_by_machine.values())
    running = [process.machine for process in processes if process.state == "running"]
    compared = [record for machine in running for record in records_by_machine[machine]]
    metrics = sorted({name for record in compared for name in record.columns})
    length = math.ceil(seconds) + math.ceil(MAX_AHEAD)
    values = np.full((len(running), len(metrics), length), np.nan, np.float32)
    for row, name in enumerate(running):
        for record in records_by_machine[name]:
            _write_samples(values[row], record, metrics, start)
    # Up to the last tick at which any machine has a sample.
    used = np.flatnonzero(np.isfinite(values).any(axis=(0, 1)))
    values = values[:, :, : used[-1] + 1 if used.size else 0]
    return Aligned(Fleet(tuple(running), tuple(metrics), start, values=values), processes)


def _newest(records: Sequence[Record]) -> float:
    """Unix time of the newest sample, NaN if there is none."""
    return max(
        (float(record.times.max()) for record in records if len(record.times)), default=math.nan
    )


def _process_state(records: Sequence[Record], now: float | int) -> Process:
    last = max(records, key=lambda record: record.begun)
    times = np.concatenate([record.times for record in records])
    future = int((times > now + MAX_AHEAD).sum())
    within = times[times <= now + MAX_AHEAD]
    if len(times) == 0:
        state = "no data"
    elif future and (len(within) == 0 or now - within.max() > MAX_AGE):
        state = "clock ahead"
    elif last.ended:
        state = "ended"
    else:
        state = "silent" if now - within.max() > MAX_AGE else "running"
    return Process(
        machine=last.machine,
        host=last.host,
        state=state,
        age=now - _newest(records),
        damaged=sum(record.damaged for record in records),
        torn=sum(record.torn for record in records),
        future=future,
    )


def _write_samples(
    values: np.ndarray, record: Record, metrics: Sequence[str], start: float
) -> None:
    """Writes the samples of one record at their ticks; later written samples overwrite earlier."""
    ticks = np.floor(record.times - start + 0.5)
    inside = np.flatnonzero((ticks >= 0) & (ticks < values.shape[1]))[::-1]
    tick, last = np.unique(ticks[inside].astype(int), return_index=True)
    for name, samples in zip(record.columns, record.values[inside[last]].T, strict=True):
        valid_samples = np.where(mask_valid(name, samples), samples, np.nan)
        values[metrics.index(name), tick] = valid_samples
