"""Which rows the prompts of an admission stand in, where several share one: on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jrl.rollout.decoding.programs.packed import CHUNK, Copies, Packing
from jrl.rollout.decoding.seating import Arriving, bucket, first_fit, one_row, shared_width


@dataclass(frozen=True)
class RowPlan:
    """Rows for some prompts.

    Attributes:
      width: tokens of a row.
      num_rows: on each rank.
      starts: of each rank, where each of its prompts begins, rows counted through.
    """

    width: int
    num_rows: int
    starts: list[list[int]]


def row_count(least: int) -> int:
    """The next number of rows that programs have, a power of two."""
    return bucket(least, 2 * least, least=1)


def row_sizes(widths: Sequence[int], per_rank: int, most_tokens: int) -> list[tuple[int, int]]:
    """All widths and numbers of the rows that a rank runs at once, each pair of which is a program:
    of one row, and of several where one does not hold them.

    Args:
      widths: of rows (`seating.row_widths`).
      per_rank: slots of a rank, and so prompts at most.
      most_tokens: that are run at once, about.
    """
    alone = one_row(widths)
    sizes = [(width, 1) for width in alone]
    for width in widths[1:] or widths:
        several = _numbers(width, per_rank, most_tokens)
        sizes += [(width, rows) for rows in several if width * rows > alone[-1]]
    return sizes


def own_sizes(widths: Sequence[int], per_rank: int, most_tokens: int) -> list[tuple[int, int]]:
    """`row_sizes` where each prompt has a row of its own.

    Args:
      widths: of those rows, ascending.
    """
    return [(w, rows) for w in widths for rows in _numbers(w, per_rank, most_tokens)]


def _numbers(width: int, per_rank: int, most_tokens: int) -> list[int]:
    """How many rows of this width a rank may run at once, ascending."""
    most = row_count(min(per_rank, max(1, most_tokens // width)))
    return [2**power for power in range(most.bit_length())]


def plan_rows(arriving: Arriving, widths: Sequence[int]) -> RowPlan:
    """Each prompt in the first row that has room for it, in their order; in one row, where it holds
    them all.

    Args:
      arriving: with prompts to run.
      widths: that rows may have (`seating.row_widths`).
    """
    lengths = [[len(ids) for ids in runs] for runs in arriving.runs]
    width, *_ = one_row(widths, max(map(sum, lengths))) or [
        shared_width(widths, max(map(max, filter(None, lengths))))
    ]
    starts = [first_fit(own, width) for own in lengths]
    # The rank that needs most decides: the program has one shape on all.
    needed = max(max(own) // width + 1 for own in starts if own)
    return RowPlan(width, row_count(needed), starts)


def packing_of(plan: RowPlan, arriving: Arriving, slots: int, pad_id: int) -> Packing[np.ndarray]:
    """The rows themselves.

    Args:
      slots: in all.
    """
    ranks = len(plan.starts)
    shape = ranks, plan.num_rows * plan.width
    tokens = np.full(shape, pad_id, np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for rank, (runs, starts) in enumerate(zip(arriving.runs, plan.starts, strict=True)):
        for number, (ids, start) in enumerate(zip(runs, starts, strict=True), 1):
            there = slice(start, start + len(ids))
            tokens[rank, there], segments[rank, there] = ids, number
            positions[rank, there] = np.arange(len(ids))
    ends = np.zeros(slots, np.int32)
    for slot, request, source in arriving.seats:
        # Ranks have equal runs of the slots, so a slot's number says its rank.
        ends[slot] = plan.starts[slot * ranks // slots][source] + request.length - 1
    tokens, segments, positions = (x.reshape(-1, plan.width) for x in (tokens, segments, positions))
    return Packing(tokens, segments, positions, ends)


def copies_of(
    plan: RowPlan, arriving: Arriving, slots: int, columns: int, cache_columns: int
) -> Copies[np.ndarray]:
    """What is copied into the cache.

    Args:
      slots: in all.
      columns: tokens of the longest row.
      cache_columns: that the cache has, which is as wide as the longest prompt or wider.
    """
    ranks = len(plan.starts)
    per_rank, size = slots // ranks, min(CHUNK, cache_columns)
    planned: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for slot, request, source in arriving.seats:
        rank, own = divmod(slot, per_rank)
        start = plan.starts[rank][source]
        # The last ones of a slot overlap where it is no multiple of them.
        places = (min(c, cache_columns - size) for c in range(0, request.length, size))
        planned[rank] += [(own, start + column, column) for column in places]
    # The most there can be, as it is a shape; `number` says how many are made.
    room = per_rank * -(-columns // min(CHUNK, columns))
    copies = np.zeros((ranks, room, 3), np.int32)
    for rank, own in enumerate(planned):
        copies[rank, : len(own)] = np.reshape(own, (-1, 3))
    number = np.array(list(map(len, planned)), np.int32)
    own_slots, begins, into = np.moveaxis(copies.reshape(-1, 3), 1, 0)
    return Copies(own_slots, begins, into, number)
