"""Input and output of a detector: the metrics of all machines on one clock, alarms, reports."""

import io
import math
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float64, Int

FLEET_VERSION = 1
NO_MACHINE = -1
"""Row index for no machine."""
INCOMPARABLE = 4
"""Exit status if nothing could be compared, so that the absence of alarms means nothing."""


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
          ValueError: where the file is damaged, truncated or something else.
          OSError: where it cannot be read.
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
      cause: the cause that the machine itself reports, in words; empty without one.
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
"""Names the outlier machines, the most certain first; an empty list where there is none."""


@dataclass(frozen=True)
class Trace:
    """The machine farthest from the others over time, in one metric.

    Attributes:
      times: Unix time of each moment, in seconds.
      scores: the greatest score of any machine; NaN where none was computed.
      leader: row of the machine that has it, or `NO_MACHINE` where it is below the threshold.
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
