"""Windows of a record, medians over them, and pauses of the fleet: windows without evidence about
single machines, because all machines pause.

Machines that differ permanently, by a per cent or by a tenth, differ in proportion to their work:
not at all during a checkpoint, less during an evaluation. Compared with such a pause, each of these
differences would look new. So a machine is compared only with itself, in windows in which the fleet
did the same work.

A machine's fault differs from a pause. Other machines that wait for it lose a part of their work in
some metrics; in a pause most metrics of most machines fall together.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jrl.faults.collect.fleet import Fleet
from jrl.faults.collect.vocabulary import GPU_ACTIVITY, meaning
from jrl.faults.outlier import nan_median, stretches

SAME_WORK = 1.5
"""Factor within which two levels of a fleet are the same work. A difference in proportion to the
work changes by less than that factor then, while an onset doubles a deviation at least."""
UNLIKE = 0.25
"""Share of the metrics from which on windows that differ by more than that are other work."""
EXACTLY = 1.2
"""Factor within which windows are counted, to find the most frequent work."""
LOW = 0.05
"""Share of the full level below which differences between levels do not count."""
PAUSED = 0.5
"""Share of the fleet's full activity below which it pauses."""
STOPPED = 0.25
"""Share of the fleet's full activity below which it does not work; idle GPUs draw less power."""
RESTART = 120.0
"""Seconds without work after which machines may have other roles than before."""
SETTLING = 60.0
"""Seconds after a restart in which machines resume one after the other."""
MAX_SAMPLED = 128
"""Maximum number of machines in the median over a fleet, as more hardly change it; also of windows
whose work is tried as the most frequent."""


@dataclass(frozen=True)
class Grid:
    """Windows of a record in samples, from seconds and the time between two samples.

    Attributes:
      width: samples of a window.
      hop: samples from one window to the next.
      overlap: windows from one to the first that shares no sample with it.
      length: windows wholly inside the time of continuity; two more where a window is one or
        two samples.
      recent: number of windows just before a moment.
      lag: windows between the two whose difference measures noise: a minute, at least `overlap`.
    """

    width: int
    hop: int
    overlap: int
    length: int
    recent: int
    lag: int

    @classmethod
    def from_seconds(
        cls,
        period: float | int,
        *,
        window: float | int,
        hop: float | int,
        continuity: float | int,
        recent: float | int,
    ) -> "Grid":
        """The grid of these seconds, see `jrl.faults.shift.ShiftDetector`."""
        num_hop = max(1, round(hop / period))
        width = max(1, round(window / period))
        step = num_hop * period
        overlap = -(-width // num_hop)
        return cls(
            width=width,
            hop=num_hop,
            overlap=overlap,
            # Every sample that a deviation touches counts in a window of one or two.
            length=max(1, round(continuity / step) + (1 if width < 3 else 1 - overlap)),
            recent=max(1, round(recent / step)),
            lag=max(overlap, round(60.0 / step)),
        )

    def count(self, num_samples: int) -> int:
        """Windows of a record."""
        return max(0, (num_samples - self.width) // self.hop + 1)

    def split(self, values: Float[np.ndarray, "row time"]) -> Float[np.ndarray, "row window width"]:
        """The samples of each window."""
        return np.lib.stride_tricks.sliding_window_view(values, self.width, axis=1)[:, :: self.hop]

    def medians(self, values: Float[np.ndarray, "row time"]) -> Float[np.ndarray, "row window"]:
        """Median of the samples of each window; NaN where there are none."""
        return nan_median(self.split(values), 2)

    def lower_quartiles(
        self, values: Float[np.ndarray, "row time"]
    ) -> Float[np.ndarray, "row window"]:
        """The value that a quarter of the samples of each window is below; NaN without samples."""
        ordered = np.sort(self.split(values), axis=2)  # NaN comes last
        index = np.isfinite(ordered).sum(axis=2) // 4
        return np.take_along_axis(ordered, index[:, :, None], 2)[:, :, 0]


def comparable_windows(fleet: Fleet, grid: Grid) -> Int[np.ndarray, "selected"]:
    """Indices of the windows in which the fleet did the same work, that which was most frequent.

    The metrics are those of activity (`GPU_ACTIVITY`, or CPU usage without GPUs), each as the
    median over the fleet. The *full level* of a metric is the one that half of `continuity`
    reaches, for the record may begin in a long pause. Left out are

    * pauses: windows of which a quarter or more is below `PAUSED` of the full level, in more than
      half of the metrics;
    * all before the end of a restart: `RESTART` seconds in which more than half of the metrics are
      below `STOPPED` of it;
    * other work: windows in which `UNLIKE` of the metrics or more differ by more than `SAME_WORK`
      from most others.
    """
    rows = np.random.default_rng(0).permutation(len(fleet.machines))[:MAX_SAMPLED]
    names = [name for name in fleet.metrics if meaning(name) in GPU_ACTIVITY]
    names = names or [name for name in fleet.metrics if meaning(name) == "cpu_usage"]
    shares, lowest = [], []
    for name in names:
        fleet_median = nan_median(fleet.values[rows, fleet.metrics.index(name)], 0)[None]
        level = grid.medians(fleet_median)[0]
        full = _full_level(level, grid)
        if full > 0:
            shares.append(level / full)
            lowest.append(grid.lower_quartiles(fleet_median)[0] / full)
    mask = np.ones(grid.count(fleet.num_samples), bool)
    if shares:
        mask &= ~_most_below(np.stack(lowest), PAUSED)
        mask[: _end_of_restart(np.stack(lowest), grid.hop * fleet.period)] = False
        mask &= _most_frequent(np.stack(shares), mask)
    return np.flatnonzero(mask)


def _full_level(level: Float[np.ndarray, "window"], grid: Grid) -> float:
    """The level that half of `continuity` reaches; 0 without samples."""
    ordered = np.sort(level[np.isfinite(level)])[::-1]
    return float(ordered[min(grid.length // 2, len(ordered) - 1)]) if len(ordered) else 0.0


def _most_below(shares: Float[np.ndarray, "metric window"], limit: float) -> np.ndarray:
    """True on windows in which more than half of the metrics with samples are below a limit."""
    return 2 * (shares < limit).sum(axis=0) > np.isfinite(shares).sum(axis=0)


def _end_of_restart(shares: Float[np.ndarray, "metric window"], step: float) -> int:
    """The first window after the last restart, when all machines work again; 0 without one."""
    stopped = _most_below(shares, STOPPED)
    ends = [
        end + round(SETTLING / step)
        for begin, end in stretches(stopped)
        if stopped[begin] and (end - begin) * step >= RESTART
    ]
    return max(ends, default=0)


def _most_frequent(
    shares: Float[np.ndarray, "metric window"], mask: Bool[np.ndarray, "window"]
) -> Bool[np.ndarray, "window"]:
    """True on the windows that do the same work as the one that most others are like."""
    logs = np.log(np.maximum(shares, 0) + LOW)
    windows = np.flatnonzero(mask)

    def same_work(window: int, factor: float) -> np.ndarray:
        differs = np.abs(logs - logs[:, window, None]) > np.log(factor)
        return mask & (differs.mean(axis=0) < UNLIKE)

    # The last windows first: of two kinds of work that are as frequent, the newer is compared.
    candidates = windows[:: -max(1, len(windows) // MAX_SAMPLED)].tolist()
    # A window between two kinds of work is like both, but few are like it exactly.
    typical = max(candidates, key=lambda window: same_work(window, EXACTLY).sum(), default=None)
    if typical is None:
        return mask
    same = same_work(typical, SAME_WORK)
    other = np.concatenate([[False], mask & ~same, [False]])
    return same & ~other[2:] & ~other[:-2]
