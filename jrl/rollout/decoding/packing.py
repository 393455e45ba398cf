"""Which rows the prompts of an admission stand in, where several share one: on the host."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jrl.rollout.decoding.seating import (
    NARROWEST_ROW,
    RUNS_PER_ROW,
    SMALLEST,
    Arriving,
    bucket,
    first_fit,
)

FEWEST_RUNS = 16
"""Prompts and slots that there is room for at least: samples of a prompt take a slot each."""


@dataclass(frozen=True)
class RowPlan:
    """Rows for some prompts.

    Attributes:
      width: tokens of a row.
      num_rows: on each rank.
      num_runs: on each rank, prompts and slots that take one there is room for.
      starts: ``[rank, run]`` where each begins, rows counted through.
    """

    width: int
    num_rows: int
    num_runs: int
    starts: np.ndarray


def row_count(least: int) -> int:
    """The next number of rows that programs have: 1, 2, 3, 4, 6, 8, 12, 16 and so on."""
    power = 1
    while power < least:
        power *= 2
    return power * 3 // 4 if power >= 4 and power * 3 // 4 >= least else power


def plan_rows(arriving: Arriving, columns: int, unit: int, per_rank: int) -> RowPlan:
    """Each prompt in the first row that has room for it, in their order.

    Args:
      arriving: with prompts to run.
      columns: tokens of the longest row.
      unit: what the width of a row is a multiple of.
      per_rank: slots of a rank, and so prompts at most.
    """
    lengths = [[len(ids) for ids in runs] for runs in arriving.runs]
    together, most = max(map(sum, lengths)), max(map(len, lengths))
    least = NARROWEST_ROW
    if together <= NARROWEST_ROW // 2 and most <= RUNS_PER_ROW:
        # One row holds them all: it is no wider than they are.
        least, wide = SMALLEST, together
    else:
        wide = max(map(max, filter(None, lengths)))
    width = -(-bucket(wide, columns, least) // unit) * unit
    placed = [first_fit(own, width) for own in lengths]
    needed = max((max(starts) // width + 1 for starts in placed if starts), default=1)
    num_rows = row_count(max(needed, -(-most // RUNS_PER_ROW)))
    num_runs = min(max(RUNS_PER_ROW * num_rows, FEWEST_RUNS), per_rank)
    seats = Counter(slot // per_rank for slot, *_ in arriving.seats)
    if max(seats.values()) > num_runs:  # more samples than prompts
        num_runs = per_rank
    starts = np.zeros((len(placed), num_runs), np.int32)
    for rank, own in enumerate(placed):
        starts[rank, : len(own)] = own
    return RowPlan(width, num_rows, num_runs, starts)
