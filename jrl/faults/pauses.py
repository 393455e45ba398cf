"""Windows of a record, medians over them, and pauses of the fleet: windows without evidence about
single machines, because all machines pause.

Machines that differ permanently, by a per cent or by a tenth, differ in proportion to their work:
not at all during a checkpoint, less during an evaluation. Compared with such a pause, each of these
differences would look new. So a machine is compared only with itself, in windows in which the fleet
did the same work.

A machine's fault differs from a pause. Other machines that wait for it lose a part of their work in
some metrics: they spin in collectives and are reported as busy. In a pause most metrics of most
machines fall together. So windows of other work remain: machines are compared in them by ratios,
which change little with the work (`Work`).

Within a training step machines compute and communicate. Windows that are shorter than a step
alternate between the two, and a machine deviates in some of them only. So windows are as long as a
step, whose length shows in the rhythm of the GPUs' activity (`step_seconds`).
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
MAX_RHYTHM = 16
"""Maximum number of machines whose rhythm is averaged."""
ALTERNATES = 0.08
"""Least relative standard deviation, over the metrics of activity, by which windows alternate."""
CLEAR = 0.25
"""Least height of a peak of the autocorrelation above the least value before it."""
NEARLY = 0.8
"""Of peaks that are nearly as high the shortest is the step; the others are its multiples."""


@dataclass(frozen=True)
class Grid:
    """Windows of a record in samples, from seconds and the time between two samples.

    Attributes:
      width: samples of a window.
      part: samples whose middle half is averaged; a longer window is the mean of its parts.
      hop: samples from one window to the next.
      overlap: windows from one to the first that shares no sample with it.
      length: windows wholly inside the time of continuity; two more if a window is one or two
        samples. With windows of a step as many more as begin in it, since a mean also shows what a
        part of its window has.
      recent: number of windows just before a moment.
      lag: windows between the two whose difference measures noise: a minute, at least `overlap`.
    """

    width: int
    part: int
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
        step: float | int = 0.0,
    ) -> "Grid":
        """The grid of these seconds, see `jrl.faults.shift.ShiftDetector`.

        Args:
          step: seconds of a training step that windows are to cover; 0 for no more than `window`.
        """
        num_hop = max(1, round(hop / period))
        part = max(1, round(window / period))
        # The parts of a window begin throughout a step, so its rhythm cancels.
        width = part + num_hop * (max(1, round(step / period / num_hop)) - 1)
        between = num_hop * period
        overlap = -(-width // num_hop)
        # Every sample that a deviation touches counts in a window of one or two.
        length = round(continuity / between) + (1 if part < 3 else 1 - -(-part // num_hop))
        return cls(
            width=width,
            part=part,
            hop=num_hop,
            overlap=overlap,
            length=max(1, length + (width - part) // num_hop),
            recent=max(1, round(recent / between)),
            lag=max(overlap, round(60.0 / between)),
        )

    def count(self, num_samples: int) -> int:
        """Windows of a record."""
        return max(0, (num_samples - self.width) // self.hop + 1)

    def split(self, values: Float[np.ndarray, "row time"]) -> Float[np.ndarray, "row window width"]:
        """The samples of each window."""
        return np.lib.stride_tricks.sliding_window_view(values, self.width, axis=1)[:, :: self.hop]

    def middles(self, values: Float[np.ndarray, "row time"]) -> Float[np.ndarray, "row window"]:
        """Mean of the middle half of the first `part` samples of each window; NaN if it has
        none."""
        parts = np.lib.stride_tricks.sliding_window_view(values, self.part, axis=1)[:, :: self.hop]
        return middle_mean(np.sort(parts, axis=2))

    def means(self, middles: Float[np.ndarray, "row part"]) -> Float[np.ndarray, "row window"]:
        """Mean of the parts in each window; of windows that are one part they are the same."""
        if self.width == self.part:
            return middles
        return moving_mean(middles, (self.width - self.part) // self.hop + 1)

    def lower_quartiles(
        self, values: Float[np.ndarray, "row time"]
    ) -> Float[np.ndarray, "row window"]:
        """The value that a quarter of the samples of each window is below; NaN without samples."""
        ordered = np.sort(self.split(values), axis=2)  # NaN comes last
        index = np.isfinite(ordered).sum(axis=2) // 4
        return np.take_along_axis(ordered, index[:, :, None], 2)[:, :, 0]


@dataclass(frozen=True)
class Work:
    """Windows in which the fleet works.

    The metrics show activity (`GPU_ACTIVITY`, or CPU usage without GPUs), each as the median over
    the fleet. The *full level* of a metric is the one that half of `continuity` reaches, as the
    record may begin in a long pause. Left out are

    * pauses: windows of which a quarter or more is below `PAUSED` of the full level of such
      quarters, in more than half of the metrics. Metrics that are near 0 for a part of each step
      say nothing about pauses;
    * all before the end of a restart: `RESTART` seconds in which more than half of the metrics are
      below `STOPPED` of it.

    Attributes:
      windows: their indices.
      same: true for the most frequent work. In the others `UNLIKE` of the metrics or more differ by
        more than `SAME_WORK` from it: an evaluation, rollouts, or a fault for which all wait.
    """

    windows: Int[np.ndarray, "selected"]
    same: Bool[np.ndarray, "selected"]

    @classmethod
    def find(cls, fleet: Fleet, grid: Grid) -> "Work":
        """The windows of a fleet."""
        rows = np.random.default_rng(0).permutation(len(fleet.machines))[:MAX_SAMPLED]
        levels, lowest = [], []
        for name in activity_metrics(fleet):
            fleet_median = nan_median(fleet.values[rows, fleet.metrics.index(name)], 0)[None]
            level, low = (
                grid.means(grid.middles(fleet_median))[0],
                grid.lower_quartiles(fleet_median)[0],
            )
            full = _full_level(level, grid)
            if full > 0:
                levels.append(level / full)
                usual = np.median(low[level >= PAUSED * full]) / full
                lowest.append(low / full / usual if usual > LOW else np.full_like(low, np.nan))
        working = np.ones(grid.count(fleet.num_samples), bool)
        same = working
        if levels:
            working = ~_most_below(np.stack(lowest), PAUSED)
            working[: _end_of_restart(np.stack(lowest), grid, fleet.period)] = False
            same = _most_frequent(np.stack(levels), working)
        windows = np.flatnonzero(working)
        return cls(windows, same[windows])


def activity_metrics(fleet: Fleet) -> list[str]:
    """The recorded metrics by which work is told from pauses."""
    names = [name for name in fleet.metrics if meaning(name) in GPU_ACTIVITY]
    return names or [name for name in fleet.metrics if meaning(name) == "cpu_usage"]


def middle_mean(ordered: Float[np.ndarray, "row window sample"]) -> np.ndarray:
    """Mean without the lowest and the highest quarter, of samples that are sorted, NaN last.

    A median jumps between two levels if a metric has each for half of the time, as in a step.
    """
    size = ordered.shape[-1]
    count = np.isfinite(ordered).sum(axis=-1)
    if (count == size).all():
        return ordered[..., size // 4 : size - size // 4].mean(axis=-1)
    index, cut = np.arange(size), count // 4
    inside = (index >= cut[..., None]) & (index < (count - cut)[..., None])
    total = np.where(inside, ordered, 0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count - 2 * cut, 1), np.nan)


def moving_mean(
    values: Float[np.ndarray, "row window"], count: int
) -> Float[np.ndarray, "row moment"]:
    """Mean over each `count` entries that follow each other, without NaN; NaN if all are."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0), axis=1, dtype=np.float64)
    counts = np.cumsum(finite, axis=1)
    sums, counts = (np.pad(each, ((0, 0), (1, 0))) for each in (sums, counts))
    total, number = (each[:, count:] - each[:, :-count] for each in (sums, counts))
    return np.where(number > 0, total / np.maximum(number, 1), np.nan).astype(values.dtype)


def _full_level(level: Float[np.ndarray, "window"], grid: Grid) -> float:
    """The level that half of `continuity` reaches; 0 without samples."""
    ordered = np.sort(level[np.isfinite(level)])[::-1]
    return float(ordered[min(grid.length // 2, len(ordered) - 1)]) if len(ordered) else 0.0


def _most_below(shares: Float[np.ndarray, "metric window"], limit: float) -> np.ndarray:
    """True on windows in which more than half of the metrics with samples are below a limit."""
    return 2 * (shares < limit).sum(axis=0) > np.isfinite(shares).sum(axis=0)


def _end_of_restart(
    shares: Float[np.ndarray, "metric window"], grid: Grid, period: float | int
) -> int:
    """The first window after the last restart, when all machines work again; 0 if there was
    none."""
    step = grid.hop * period
    # A window longer than a part has its lowest quarter in a pause for longer.
    least = RESTART + (grid.width - grid.part) * period / 2
    stopped = _most_below(shares, STOPPED)
    ends = [
        end + round(SETTLING / step)
        for begin, end in stretches(stopped)
        if stopped[begin] and (end - begin) * step >= least
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


def step_seconds(fleet: Fleet, longest: float | int, window: float | int) -> float:
    """Seconds of a training step of at most `longest`; 0 if means over `window` hardly alternate.

    If the step changes, as by a fault for which all wait, it is the longer of two: each half of the
    record has its own.
    """
    rows = np.random.default_rng(0).permutation(len(fleet.machines))[:MAX_RHYTHM]
    columns = [fleet.metrics.index(name) for name in activity_metrics(fleet)]
    most = int(longest / fleet.period)
    if not columns or most < 2:
        return 0.0
    half = fleet.num_samples // 2
    values = fleet.values[rows][:, columns].reshape(-1, fleet.num_samples)
    values = moving_mean(values, max(1, round(window / fleet.period)))
    lags = [_period(part, most) for part in (values[:, :half], values[:, half:])]
    return max(lags) * fleet.period


def _period(values: Float[np.ndarray, "row time"], most: int) -> int:
    """Lag, in samples, of the first high peak of the mean autocorrelation; 0 if there is none."""
    size = values.shape[1]
    if size < 3 * most:
        return 0
    middle = nan_median(values, 1)[:, None]
    rest = np.nan_to_num((values - middle) / np.maximum(np.abs(middle), 1e-9))
    # A pause is far from all else, once: it is limited to what a step does.
    limit = np.quantile(np.abs(rest), 0.8, axis=1, keepdims=True)
    rest = np.clip(rest, -limit, limit)
    rest -= rest.mean(axis=1, keepdims=True)
    power = np.abs(np.fft.rfft(rest, 2 * size, axis=1)) ** 2
    correlation = np.fft.irfft(power.sum(axis=0))[: most + 2]
    if not correlation[0] > 0:
        return 0
    variance = correlation[0] / values.size
    correlation = correlation / correlation[0] * size / (size - np.arange(most + 2))
    before = np.minimum.accumulate(correlation)
    lags = np.arange(2, most + 1)
    peak = (correlation[lags] >= correlation[lags - 1]) & (
        correlation[lags] > correlation[lags + 1]
    )
    peak &= correlation[lags] * variance > ALTERNATES**2
    clear = peak & (correlation[lags] - before[lags] > CLEAR)
    if not clear.any():
        return 0
    high = clear & (correlation[lags] >= NEARLY * correlation[lags[clear]].max())
    return int(lags[high.argmax()])
