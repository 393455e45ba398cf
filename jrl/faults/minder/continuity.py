"""Continuity check: an alarm requires the same outlier machine for minutes, to ignore noise.

A window *names* a machine where that machine has the greatest score of all and it exceeds the
threshold. `NO_MACHINE` of `jrl.faults.collect.fleet` means no machine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

UNSEEN = -2
"""Marks a window that has not been scored yet."""


@dataclass(frozen=True)
class Span:
    """The windows, first to last, in which a machine is the outlier."""

    machine: int
    first: int
    last: int
    hits: int


def find_span(
    named: Int[np.ndarray, " window"], *, length: int, share: float | int = 1.0
) -> Span | None:
    """The stretch with the most hits in which one machine is the outlier for long enough.

    Every `length` windows of the stretch in a row name the machine in at least ``share length`` of
    them. The stretch is trimmed to the first and last window that name it.

    Args:
      named: the machine that each window names, or `NO_MACHINE`.
      length: windows in a row, at least 1.
      share: of them that must name the machine, in (0, 1].
    """
    best = None
    for machine in np.unique(named[named >= 0]):
        for first, last in _stretches(_has_enough_hits(named == machine, length, share), length):
            hits = np.flatnonzero(named[first : last + 1] == machine)
            span = Span(int(machine), int(first + hits[0]), int(first + hits[-1]), len(hits))
            if best is None or span.hits > best.hits:
                best = span
    return best


def _has_enough_hits(
    hit: Bool[np.ndarray, " window"], length: int, share: float | int
) -> np.ndarray:
    """Mask of the windows from which on `length` windows hold enough hits."""
    if hit.size < length:
        return np.zeros(0, bool)
    total = np.r_[0, np.cumsum(hit)]
    return total[length:] - total[:-length] >= max(1, math.ceil(share * length - 1e-9))


def _stretches(enough: np.ndarray, length: int) -> list[tuple[int, int]]:
    """First and last window of each run of windows from which on there are enough hits."""
    edge = np.flatnonzero(np.diff(np.r_[False, enough, False].astype(np.int8)))
    return [(first, last + length - 2) for first, last in edge.reshape(-1, 2).tolist()]


def score_where_needed(
    score_windows: Callable[[Int[np.ndarray, " subset"]], Int[np.ndarray, " subset"]],
    num_windows: int,
    *,
    length: int,
    share: float | int,
) -> Int[np.ndarray, " window"]:
    """Machine that each window names, scoring only windows that can affect `find_span`.

    Every eighth window is scored first. Where these already name other machines too often, no
    stretch of `length` windows can hold enough hits, whatever the windows between them name. The
    windows of the other stretches are scored with decreasing stride. `find_span` returns the same
    as if all windows were scored.

    Returns:
      One name per window; `UNSEEN` for those that cannot matter.
    """
    named = np.full(num_windows, UNSEEN)
    matters = np.full(num_windows, num_windows >= length)
    for stride in (8, 4, 2, 1):
        due = np.flatnonzero(matters & (named == UNSEEN))
        due = due[due % stride == 0]
        if due.size:
            named[due] = score_windows(due)
        matters = _can_matter(named, length, share)
    return named


def _can_matter(named: np.ndarray, length: int, share: float | int) -> np.ndarray:
    """Windows inside a stretch that may hold enough hits of one machine, the unseen all hits."""
    matters = np.zeros(named.size, bool)
    # Windows not scored yet may all name a machine that no window names so far.
    for machine in (*np.unique(named[named >= 0]), UNSEEN):
        possible = _has_enough_hits((named == machine) | (named == UNSEEN), length, share)
        for first, last in _stretches(possible, length):
            matters[first : last + 1] = True
    return matters
