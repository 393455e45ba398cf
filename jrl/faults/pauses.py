"""Pauses of a fleet: windows that are no evidence about one machine, for all machines pause there.

Machines that differ permanently, by a per cent or by a tenth, differ in proportion to their work:
not at all during a checkpoint, less during an evaluation. A detector that takes such a pause for
the past finds every one of these differences new after it. So like is compared with like: a machine
with itself, in windows in which the fleet did the same work.

A machine's fault does not look like a pause. Others that wait for it lose a part of their work in
some metrics; in a pause most metrics of most machines fall together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from jrl.faults.collect.fleet import Fleet
from jrl.faults.collect.vocabulary import GPU_ACTIVITY, WORK, meaning
from jrl.faults.outlier import nan_median, stretches
from jrl.faults.windows import Grid

SAME_WORK = 1.5
"""Factor within which two levels of a fleet are the same work. A difference in proportion to the
work changes by less than that factor then, while an onset doubles a deviation at least."""
STOPPED = 0.25
"""Share of the fleet's full activity below which it does not work; idle GPUs draw less power."""
RESTART = 120.0
"""Seconds without work after which machines may have other roles than before."""
SETTLING = 60.0
"""Seconds after a restart in which machines resume one after the other."""
MAX_SAMPLED = 128
"""Machines that the median over a fleet is taken of: more hardly change it."""


@dataclass(frozen=True)
class Work:
    """Work of a fleet over the windows of a record.

    Attributes:
      mask: true on windows in which the fleet works, since its last restart.
      levels: of each metric that follows the work, the median over the fleet.
    """

    mask: Bool[np.ndarray, "window"]
    levels: Mapping[str, Float[np.ndarray, "window"]]

    def comparable_windows(self, metric: str) -> Int[np.ndarray, "selected"]:
        """Indices of the windows of the same work as most others, for one metric."""
        windows = np.flatnonzero(self.mask)
        if metric not in self.levels:
            return windows
        return windows[_most_alike(self.levels[metric][windows])]


def measure_work(fleet: Fleet, grid: Grid) -> Work:
    """Windows in which the fleet works, and its level in each metric of `WORK`.

    A metric's *full level* is the one that half of `continuity` reaches, for the record may begin in
    a long pause. The fleet pauses where more than half of the activity metrics (`GPU_ACTIVITY`, CPU
    usage without GPUs) are below ``1 / SAME_WORK`` of theirs. It has stopped where more than half
    are below `STOPPED`; after `RESTART` seconds of that, what was before is no longer compared.
    """
    rows = np.random.default_rng(0).permutation(len(fleet.machines))[:MAX_SAMPLED]
    levels = {}
    for column, name in enumerate(fleet.metrics):
        if meaning(name) in WORK:
            fleet_median = nan_median(fleet.values[rows, column], 0)
            levels[name] = grid.medians(fleet_median[None])[0]
    activity = [level for name, level in levels.items() if meaning(name) in GPU_ACTIVITY]
    activity = activity or [level for name, level in levels.items() if meaning(name) == "cpu_usage"]
    num_windows = grid.count(fleet.num_samples)
    shares = [share for level in activity if (share := _shares(level, grid)) is not None]
    if not shares:
        return Work(np.ones(num_windows, bool), levels)
    mask = ~_most_below(np.stack(shares), 1 / SAME_WORK)
    step = grid.hop * fleet.period
    for begin, end in stretches(stopped := _most_below(np.stack(shares), STOPPED)):
        if stopped[begin] and (end - begin) * step >= RESTART:
            mask[: end + round(SETTLING / step)] = False
    return Work(mask, levels)


def _shares(level: np.ndarray, grid: Grid) -> np.ndarray | None:
    """A level relative to its full level; None for a metric without samples or that is 0."""
    ordered = np.sort(level[np.isfinite(level)])[::-1]
    full = ordered[min(grid.length // 2, len(ordered) - 1)] if len(ordered) else 0.0
    return level / full if full > 0 else None


def _most_below(shares: Float[np.ndarray, "metric window"], limit: float) -> np.ndarray:
    """True on windows in which more than half of the metrics with samples are below a limit."""
    return 2 * (shares < limit).sum(axis=0) > np.isfinite(shares).sum(axis=0)


def _most_alike(levels: Float[np.ndarray, "window"]) -> Bool[np.ndarray, "window"]:
    """True on the largest set of levels within `SAME_WORK` of one of them; of two, the higher."""
    ordered = np.sort(levels[np.isfinite(levels)])
    if len(ordered) == 0 or ordered[0] < 0:
        return np.ones(len(levels), bool)
    count = np.searchsorted(ordered, ordered * SAME_WORK, "right") - np.searchsorted(
        ordered, ordered / SAME_WORK, "left"
    )
    middle = ordered[len(count) - 1 - int(count[::-1].argmax())]
    return (levels >= middle / SAME_WORK) & (levels <= middle * SAME_WORK)
