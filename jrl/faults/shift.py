"""Shift detector: the machine with a new deviation from the others, by robust statistics.

It needs no training, no clocks that agree to the second and no order of metrics. It does not name
machines that differed from the start. It is the default for runs; `benchmarks.faults`
compares it with Minder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int

from jrl.faults.collect.fleet import NO_MACHINE, Alarm, Fleet, Report, Trace
from jrl.faults.collect.vocabulary import PRIORITY, find_recorded, groups_of, search_order
from jrl.faults.outlier import MAD_TO_STD, nan_median, sorted_median
from jrl.faults.pauses import SAME_WORK, Grid, Work, step_seconds

LONGEST_PERIOD = 60.0
"""Maximum seconds between two samples, as four minutes have too few samples beyond it."""
HEAVY_TAIL_RATIO = 3.0
"""Ratio of the distances of the 95th and 5th percentile from the median above which a tail is
heavy."""
RATIO = 4.0
"""Minimum ratio of a machine's score to the score of most others."""
ONE_IN, PIPELINE = 50, 16
"""The other machine of that ratio: one in so many, and in small fleets the first one beyond a
pipeline."""
LOG_OFFSET = 0.1
"""Share of the typical value that is added before the logarithm, so that zero is finite."""
ACROSS = 0.25
"""Minimum ratio, as a logarithm, by which a machine moves away from the others while their work
changes: ratios of healthy machines change by less from one kind of work to another."""
JOINT = " + "
"""Separator of the metrics in the name of a group."""

Deviations = Float[np.ndarray, "machine window"]
Scores = Float[np.ndarray, "machine moment"]


@dataclass(frozen=True)
class ShiftDetector:
    """Names the machine that has moved farthest away from the others and remained there.

    For each metric, with the mean of the middle half of `window` seconds in which the fleet did the
    same work (`jrl.faults.pauses.Work`), and heavy-tailed metrics in logarithms:

    1. ``x`` is a machine's value minus the median over all machines, and ``d = x / spread``. The
       spread is ``1.4826 / sqrt(2)`` times the median of ``|x(t + 1 min) - x(t)|``: the largest of
       three: the machine's own, the median over all machines, and the latter over `continuity`
       instead of a minute. It is at least `resolution` times the metric's typical value.
    2. The *level* of the `continuity` seconds from a moment on is what `share` of their windows
       reach, on one side. *Before* is the largest, on the side of the level, of three: the median
       of ``d`` until then, the one over the last `recent` seconds, and the machine's own trend. So
       neither a return nor a drift is an onset. Nor is a machine that was farther away on the other
       side. The trend is ``m(0) + max(0, m(0) - m(1)) c``: ``m(i)`` is the median of ``d`` over
       `continuity` that ends ``i * continuity`` before the moment, on the side of the level, and
       ``c`` the time from the middle of ``m(0)`` to the first window that the level has to reach,
       in `continuity`. Where the record has less than ``m(1)`` needs, it is ``m(0)``.
    3. The score is the part of the level that is new, ``level - max(0, before)``, if at least half
       of the level, else 0. It is divided by ``1 + g / continuity`` if a pause or other work of
       ``g`` seconds, beyond the first `recent`, is between the windows just before and the middle
       of the level: a machine that drifts is farther away after it.
    4. The score of a metric counts if it reaches `threshold`, and `RATIO` times the score that one
       machine of `ONE_IN` has in that metric (the 17th in small fleets: the machines of a pipeline
       share a fault), at any moment, also with less than `past` before it. Where noise is slow, or
       many machines change, one of them is no outlier. A score of `RATIO` times `threshold` always
       counts.

    The machine with the greatest score that counts is named, over metrics and moments. Metrics that
    one cause moves together, a GPU's activity, count as one more metric, their mean: what is small
    in each of them is large in all.

    If training steps are longer than windows, these cover a whole step (`jrl.faults.pauses`).

    A metric whose level over the fleet changes by `SAME_WORK` is compared in logarithms: machines
    that differ for good keep their ratios when the work changes. Its spread is at least so large
    that a score of `threshold` is a ratio of ``exp(ACROSS)``. If no machine is named in windows of
    the same work, all windows are compared in this way, pauses left out: a fault for which all
    machines wait is other work too.

    Attributes:
      threshold: in spreads; chosen by ``python -m benchmarks.faults benchmark --calibrate``.
      continuity: seconds for which the machine has to be away.
      share: fraction of the windows in that time that reach the level, in (0.5, 1]; below 1 single
        outlier readings do not matter.
      window: seconds of a median.
      hop: seconds from one window to the next.
      recent: seconds before the onset that count as what was there just before.
      resolution: the least spread, as a share of the metric's typical value, so that differences
        of a thousandth do not count.
      past: seconds that an onset needs before it, of the same work; 0 for a single record. Where
        looks follow each other, as in `watch`, every onset passes through the middle of a record.
      metrics: what is compared, by any name of `jrl.faults.collect.vocabulary`; by default all that
        were recorded but memory in use (`LEVELS` there) and fatal error counters (`FATAL`).

    Raises:
      ValueError: for a setting outside of its range.
    """

    threshold: float | int = 2.5
    continuity: float | int = 240.0
    share: float | int = 0.85
    window: float | int = 30.0
    hop: float | int = 10.0
    recent: float | int = 60.0
    resolution: float | int = 0.01
    past: float | int = 0.0
    metrics: Sequence[str] = ()

    def __post_init__(self):
        for name in ("threshold", "continuity", "window", "hop", "recent", "resolution"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a finite number above 0.")
        if not 0 <= self.past < np.inf:
            raise ValueError(f"past={self.past} must be a finite number of at least 0.")
        if not 0.5 < self.share <= 1:
            raise ValueError(f"share={self.share} must lie in (0.5, 1].")
        if self.continuity < 2 * self.window:
            raise ValueError(
                f"continuity={self.continuity} must be at least two windows of {self.window} s."
            )

    def __call__(self, fleet: Fleet) -> list[Alarm]:
        """The machine that has shifted away from the others; an empty list if none has."""
        return self.examine(fleet).alarms

    def examine(self, fleet: Fleet) -> Report:
        """Report with the alarms, what could not be compared, and the greatest score per moment."""
        grid = Grid.from_seconds(
            fleet.period,
            window=self.window,
            hop=self.hop,
            continuity=self.continuity,
            recent=self.recent,
            step=step_seconds(fleet, self.continuity / 2, self.window),
        )
        reason = self._incomparable_reason(fleet, grid)
        if reason:
            return Report([], (reason,), comparable=False)
        work = Work.find(fleet, grid)
        report = self._compare(fleet, grid, work.windows[work.same])
        if report.alarms or work.same.all():
            return report
        across = self._compare(fleet, grid, work.windows, across=True)
        return across if across.alarms or not report.comparable else report

    def _compare(
        self, fleet: Fleet, grid: Grid, windows: Int[np.ndarray, "selected"], across: bool = False
    ) -> Report:
        """Report on some windows, of the same work or across all kinds."""
        if len(windows) < grid.overlap + grid.length + self._first_moment(fleet, grid):
            reason = (
                "the fleet did the same work, without a pause, for too short a time: no verdict."
            )
            return Report([], (reason,), comparable=False)
        names = find_recorded(self.metrics, fleet.metrics)
        if not self.metrics:
            names = search_order(PRIORITY, fleet.metrics)
        coarse = ACROSS / self.threshold
        changing: set[str] = set()
        notes: list[str] = []
        deviations: dict[str, np.ndarray] = {}
        for name in names:
            values = fleet.values[:, fleet.metrics.index(name)]
            finite = np.isfinite(values)
            if finite.any(axis=1).sum() < 3:
                notes.append(f"metric {name!r} has samples of fewer than 3 machines: not compared.")
            elif np.ptp(values[finite]) == 0:
                notes.append(f"metric {name!r} is {values[finite][0]:g} everywhere: not compared.")
            else:
                ratios = across or changes_level(values, grid, windows)
                changing |= {name} if ratios else set()
                resolution = coarse if ratios else self.resolution
                deviations[name] = deviation(values, grid, windows, resolution, ratios=ratios)
        if not deviations:
            notes.append("no metric can be compared: no verdict.")
            return Report([], tuple(notes), comparable=False)
        has_samples = np.isfinite(fleet.values).any(axis=(1, 2))
        notes += [
            f"machine {fleet.machines[row]!r} has no data: not compared. Check whether it still "
            "reports."
            for row in np.flatnonzero(~has_samples)
        ]
        for group in groups_of(deviations):
            of_group = [deviations[name] for name in group]
            least = 1.0 if changing.intersection(group) else 1.0 / len(group)
            deviations[JOINT.join(group)] = _combine_deviations(of_group, grid, least)
        times = fleet.start + grid.hop * fleet.period * windows
        return self._verdict(fleet, grid, times, deviations, tuple(notes))

    def _first_moment(self, fleet: Fleet, grid: Grid) -> int:
        """The first moment that has as much before it as `past`."""
        return max(0, round(self.past / (grid.hop * fleet.period)) - grid.overlap)

    def _incomparable_reason(self, fleet: Fleet, grid: Grid) -> str | None:
        """Reason for which a fleet cannot be compared; None if it can."""
        if len(fleet.machines) < 3:
            return (
                f"{len(fleet.machines)} machines: two cannot tell which one is off. Compare at "
                "least 3."
            )
        if fleet.period > LONGEST_PERIOD:
            return (
                f"samples come every {fleet.period:g} s, which is not often enough for "
                f"{self.continuity:g} s: scrape at least every {LONGEST_PERIOD:g} s."
            )
        num_windows = grid.overlap + grid.length + self._first_moment(fleet, grid)
        needed = (grid.hop * (num_windows - 1) + grid.width) * fleet.period
        if fleet.num_samples * fleet.period < needed:
            return (
                f"the record holds {fleet.num_samples * fleet.period:.0f} s, less than the "
                f"{needed:.0f} s that detecting a shift takes: no verdict."
            )
        return None

    def _verdict(
        self,
        fleet: Fleet,
        grid: Grid,
        times: Float64[np.ndarray, "selected"],
        deviations: dict[str, np.ndarray],
        notes: tuple[str, ...],
    ) -> Report:
        """The report; `times` are those at which the compared windows begin."""
        traces, candidates = {}, []
        for name, away in deviations.items():
            scores, signs = onset_scores(away, grid, self.share, self.threshold / RATIO)
            gaps = _gaps(times, grid, grid.hop * fleet.period)
            scores /= 1 + gaps / np.float32(self.continuity)
            # Noise is measured over all moments, as more of them measure it better.
            threshold = self._threshold(scores)
            scores[:, : self._first_moment(fleet, grid)] = 0
            leader, top = scores.argmax(axis=0), scores.max(axis=0)
            moment = int(top.argmax())
            leader_or_none = np.where(top >= threshold, leader, NO_MACHINE)
            begins = times[grid.overlap : grid.overlap + len(top)]
            traces[name] = Trace(begins, top, leader_or_none, threshold)
            if top[moment] >= threshold:
                row = int(leader[moment])
                sign = int(signs[row, moment])
                candidates.append((float(top[moment]), name, row, moment, sign))
        alarms = []
        if candidates:
            best = max(candidates, key=lambda candidate: candidate[0])
            alarms.append(self._alarm(fleet, grid, times, deviations, traces, best))
        return Report(alarms, notes, True, fleet.machines, traces)

    def _threshold(self, scores: Scores) -> float:
        """The score from which a machine is an outlier in one metric, see `ShiftDetector`."""
        greatest = np.sort(scores.max(axis=1))[::-1]
        rank = max(PIPELINE, len(greatest) // ONE_IN)
        others = float(greatest[rank]) if rank < len(greatest) else 0.0
        return float(np.clip(RATIO * others, self.threshold, RATIO * self.threshold))

    def _alarm(
        self,
        fleet: Fleet,
        grid: Grid,
        times: Float64[np.ndarray, "selected"],
        deviations: dict[str, np.ndarray],
        traces: dict[str, Trace],
        best: tuple[float, str, int, int, int],
    ) -> Alarm:
        """The alarm of `best`: its score, metric, row, moment and sign."""
        score, name, row, moment, sign = best
        begin = moment + grid.overlap
        level = slice(begin, begin + grid.length)
        away = sign * deviations[name][row]
        middle_deviation = float(np.nanmedian(away[level]))
        # From the first window that is nearer to the level than to what was before, while it lasts.
        shifted = away[begin:] >= middle_deviation - score / 2
        first = int(shifted.argmax()) if shifted.any() else 0
        # Windows without samples do not end it, but it cannot end with them.
        back = np.flatnonzero(away[begin + grid.length - 1 :] < middle_deviation - score / 2)
        last = begin + grid.length - 2 + int(back[0]) if back.size else len(away) - 1
        last = int(np.flatnonzero(np.isfinite(away[: last + 1]))[-1])
        middle = grid.width * fleet.period / 2
        evidence = {
            "score": score,
            "threshold": float(traces[name].threshold),
            "level": sign * middle_deviation,
            "machines": len(fleet.machines),
            "scores": traces[name].scores,
        }
        metric = name
        if name not in fleet.metrics:
            # The metric of a group that is farthest away is named in the alarm.
            members = name.split(JOINT)
            of_members = [np.nanmedian(sign * deviations[each][row, level]) for each in members]
            metric = members[int(np.argmax(of_members))]
            evidence["metrics together"] = len(members)
        return Alarm(
            fleet.machines[row],
            metric,
            float(times[begin + first]) + middle,
            min(fleet.end, float(times[last]) + 2 * middle),
            evidence,
        )


def deviation(
    values: Float[np.ndarray, "machine time"],
    grid: Grid,
    windows: Int[np.ndarray, "selected"],
    resolution: float | int,
    ratios: bool = False,
) -> Deviations:
    """Deviation of each machine from the others in some windows, in spreads, see `ShiftDetector`.

    NaN without samples, and for all machines where fewer than three have any. Logarithms if
    `ratios`, and for heavy tails.
    """
    used = np.zeros(values.shape[1], bool)
    for offset in range(grid.width):
        used[windows * grid.hop + offset] = True
    typical = _typical(values[:, used])
    if ratios or heavy_tailed(values[:, used]):
        # In units of the metric again, so that `resolution` means the same.
        logs = np.log(np.maximum(values, 0) / typical + LOG_OFFSET)
        values = (typical * logs).astype(np.float32)
    levels = grid.means(grid.middles(values))[:, windows]
    enough = np.isfinite(levels).sum(axis=0) >= 3
    away = np.where(enough, levels - nan_median(levels, 0), np.nan)
    return away / _spreads(away, grid, resolution * typical)[:, None]


def changes_level(
    values: Float[np.ndarray, "machine time"], grid: Grid, windows: Int[np.ndarray, "selected"]
) -> bool:
    """True if the fleet's level of a metric differs by `SAME_WORK` in over `recent` windows."""
    level = grid.means(grid.middles(nan_median(values, 0)[None]))[0, windows]
    level = np.maximum(level[np.isfinite(level)], 0)
    ratio = np.log(level + LOG_OFFSET * _typical(values))
    far = np.abs(ratio - np.median(ratio)) > np.log(SAME_WORK) if ratio.size else ratio
    return int((far > 0).sum()) > grid.recent


def _spreads(away: Deviations, grid: Grid, least: float) -> Float[np.ndarray, "machine"]:
    """The spread of each machine: the largest of its own and two of the fleet, at least `least`.

    Slow noise is larger over `continuity` than over a minute. A machine's own is not taken over so
    long a time, in which its fault may begin. Windows of a step average more samples; their spread
    is one part's, so that slow noise weighs as much.
    """
    scale = MAD_TO_STD / 2**0.5 * (grid.width / grid.part) ** 0.5
    moves = np.abs(away[:, grid.lag :] - away[:, : -grid.lag])
    slow_moves = np.abs(away[:, grid.length :] - away[:, : -grid.length])
    machine_spread = scale * nan_median(moves, 1)
    fleet_spread, slow_spread = (
        scale * float(np.median(finite)) if (finite := each[np.isfinite(each)]).size else 0.0
        for each in (moves, slow_moves)
    )
    return np.fmax(np.fmax(machine_spread, np.fmax(fleet_spread, slow_spread)), least)


def _typical(values: np.ndarray) -> float:
    """Typical absolute value of a metric: the median, or if 0 the mean or 1e-30."""
    sizes = np.abs(values[np.isfinite(values)])
    middle = float(np.median(sizes)) if sizes.size else 0.0
    return middle if middle > 0 else max(float(sizes.mean(dtype=np.float64)), 1e-30)


def heavy_tailed(values: Float[np.ndarray, "machine time"]) -> bool:
    """True if values are much farther above their median than below it, as rates of events are.

    No value is negative, and the 95th percentile is over `HEAVY_TAIL_RATIO` times as far from the
    median as the 5th. The median over the fleet at each time, such as the rhythm of a step, is
    subtracted before the percentiles are taken.
    """
    sampled = values[:, :: max(1, values.shape[1] // 128)]
    if not np.isfinite(sampled).any() or np.nanmin(values) < 0:
        return False
    rest = sampled - nan_median(sampled, 0)
    low, middle, high = np.nanquantile(rest[np.isfinite(rest)], [0.05, 0.5, 0.95])
    return bool(high - middle > HEAVY_TAIL_RATIO * (middle - low))


def _combine_deviations(deviations: Sequence[np.ndarray], grid: Grid, least: float) -> np.ndarray:
    """Mean of deviations that one cause moves together, in units of the mean's own spread.

    The mean of independent metrics varies less than each of them, the mean of equal ones as much.
    """
    mean = sum(deviations[1:], deviations[0]) / len(deviations)
    return mean / _spreads(mean, grid, least)[:, None]


def _gaps(
    times: Float64[np.ndarray, "selected"], grid: Grid, step: float
) -> Float[np.ndarray, "moment"]:
    """Seconds that are not compared between the windows just before each moment and the middle of
    its level.

    Before a pause a burst may be most of what a level needs there: what comes after decides.
    """
    last = np.arange(len(times) - grid.overlap - grid.length + 1)
    first = np.maximum(last - grid.recent + 1, 0)
    middle = last + grid.overlap + grid.length // 2
    seconds = times[middle] - times[first] - step * (middle - first)
    return np.maximum(seconds - step * grid.recent, 0).astype(np.float32)


def onset_scores(
    away: Deviations, grid: Grid, share: float | int, least: float | int = 0.0
) -> tuple[Scores, Scores]:
    """The part of each machine's level that is new, and its sign, for every moment.

    Moment k is the window ``overlap + k``: at least one window that shares no sample with the level
    precedes it. Machines with samples in less than half of a level's windows score 0. So do most
    machines, whose scores are all below `least`; they take little time. See `ShiftDetector`.
    """
    shape = len(away), away.shape[1] - grid.overlap - grid.length + 1
    scores, signs = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    rows = _rows_with_level(away[:, grid.overlap :], grid.length, share, least)
    scores[rows], signs[rows] = _all_scores(away[rows], grid, share)
    return scores, signs


def _rows_with_level(
    away: Deviations, length: int, share: float | int, least: float | int
) -> Int[np.ndarray, "row"]:
    """Rows of machines that may have a level of at least `least` on either side.

    Of a few windows in a row, one more than may be below the level, one reaches it.
    """
    few = int((1 - share) * length + 1e-9) + 1
    rows = np.zeros(len(away), bool)
    for side in (away, -away):
        filled = np.where(np.isfinite(side), side, np.inf)
        greatest = np.lib.stride_tricks.sliding_window_view(filled, few, axis=1).max(axis=2)
        count = away.shape[1] - length + 1
        parts = [greatest[:, start : start + count] for start in range(0, length - few + 1, few)]
        rows |= np.minimum.reduce(parts).max(axis=1) >= least
    return np.flatnonzero(rows)


def _all_scores(away: Deviations, grid: Grid, share: float | int) -> tuple[Scores, Scores]:
    """`onset_scores` of every machine."""
    # Of each window and those before it, `length` in all: of the levels and of what was before.
    stretch = np.sort(_trailing(away.astype(np.float32), grid.length), axis=2)  # NaN comes last
    ordered = stretch[:, grid.overlap + grid.length - 1 :]
    count = np.isfinite(ordered).sum(axis=2)
    spare = ((1 - share) * count + 1e-9).astype(int)
    enough = 2 * count >= grid.length
    scores, signs = np.zeros(enough.shape, np.float32), np.ones(enough.shape, np.float32)
    long, short = _levels_before(away, grid, ordered.shape[1])
    latest = sorted_median(stretch[:, : ordered.shape[1]])
    trend = _trend(latest, grid, share)
    for sign, index in ((1, spare), (-1, np.maximum(count - 1, 0) - spare)):
        level = sign * np.take_along_axis(ordered, index[:, :, None], 2)[:, :, 0]
        before = np.fmax(sign * long, sign * short)
        before = np.fmax(before, sign * latest + np.maximum(0, sign * trend))
        opposite = -np.fmin(sign * long, sign * short)
        new = level - np.maximum(0, before)
        new = np.where(enough & (new >= level / 2) & (level > opposite), new, 0)
        better = new > scores
        scores, signs = np.where(better, new, scores), np.where(better, sign, signs)
    return scores, signs


def _levels_before(away: np.ndarray, grid: Grid, moments: int) -> tuple[np.ndarray, np.ndarray]:
    """Each machine's median until each moment, and just before it.

    The first hardly changes late in a record: it is computed every `recent` windows there, which
    bounds the time of a long record.
    """
    exact = np.arange(moments) < grid.length
    computed = np.where(exact, np.arange(moments), np.arange(moments) // grid.recent * grid.recent)
    distinct, index = np.unique(computed, return_inverse=True)
    # Windows that overlap say little that is new.
    long = [nan_median(away[:, moment :: -grid.overlap], 1) for moment in distinct.tolist()]
    short = nan_median(_trailing(away[:, :moments], grid.recent), 2)
    return np.stack(long, axis=1)[:, index], short


def _trend(latest: Scores, grid: Grid, share: float | int) -> Scores:
    """Change of `latest` until the level has to be reached, by each machine's trend.

    `latest` is the median over the last `grid.length` windows at each moment. The trend is its
    difference from the median over as many windows before, 0 if some of them are not in the record:
    of fewer the noise is too large. Windows of other work are no time here: `_gaps` counts them.
    """
    ahead = (grid.length - 1) / 2 + grid.overlap + int((1 - share) * grid.length + 1e-9)
    first = 2 * grid.length - 1
    trend = np.zeros_like(latest)
    trend[:, first:] = latest[:, first:] - latest[:, first - grid.length : -grid.length]
    return np.nan_to_num(np.float32(ahead / grid.length) * trend)


def _trailing(away: np.ndarray, width: int) -> np.ndarray:
    """Each entry and those before it, `width` in all; NaN if there are fewer."""
    padding = np.full((len(away), width - 1), np.nan, away.dtype)
    padded = np.concatenate([padding, away], axis=1)
    return np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
