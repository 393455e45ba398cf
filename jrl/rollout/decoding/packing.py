"""Packing of prompts into shared rows for prefill, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jrl.rollout.decoding.programs.packed import CHUNK, Copies, Packing
from jrl.rollout.decoding.seating import Arriving, bucket, first_fit, one_row, shared_width


@dataclass(frozen=True)
class RowPlan:
    """Plan of the packed rows of an admission.

    Attributes:
      width: tokens of a row.
      num_rows: on each rank.
      starts: of each rank, the offset of each of its prompts in its concatenated rows.
    """

    width: int
    num_rows: int
    starts: list[list[int]]


def row_count(least: int) -> int:
    """Rounds a number of rows up to a power of two, for which functions are compiled."""
    return bucket(least, 2 * least, least=1)


def row_sizes(widths: Sequence[int], per_rank: int, most_tokens: int) -> list[tuple[int, int]]:
    """All widths and numbers of rows in a packed prefill of a rank, each pair of which is a
    compiled function: one row, and multiple rows where one is not enough.

    Args:
      widths: of rows (`seating.row_widths`).
      per_rank: slots of a rank, which is the maximum number of prompts.
      most_tokens: approximate number of tokens in one prefill.
    """
    alone = one_row(widths)
    sizes = [(width, 1) for width in alone]
    for width in widths[1:] or widths:
        several = _numbers(width, per_rank, most_tokens)
        sizes += [(width, rows) for rows in several if width * rows > alone[-1]]
    return sizes


def own_sizes(widths: Sequence[int], per_rank: int, most_tokens: int) -> list[tuple[int, int]]:
    """All widths and numbers of rows in a prefill where each prompt has a row of its own.

    Args:
      widths: of those rows, ascending.
    """
    return [(w, rows) for w in widths for rows in _numbers(w, per_rank, most_tokens)]


def _numbers(width: int, per_rank: int, most_tokens: int) -> list[int]:
    """Numbers of rows of this width that a rank may run in one prefill, ascending."""
    most = row_count(min(per_rank, max(1, most_tokens // width)))
    return [2**power for power in range(most.bit_length())]


def plan_rows(arriving: Arriving, widths: Sequence[int]) -> RowPlan:
    """Plans packed rows by first fit, in the order of the prompts; one row if it holds all.

    Args:
      arriving: with prompts to run.
      widths: allowed widths of rows (`seating.row_widths`).
    """
    lengths = [[len(ids) for ids in runs] for runs in arriving.runs]
    width, *_ = one_row(widths, max(map(sum, lengths))) or [
        shared_width(widths, max(map(max, filter(None, lengths))))
    ]
    starts = [first_fit(own, width) for own in lengths]
    # The maximum over ranks: the compiled function has one shape on all.
    needed = max(max(own) // width + 1 for own in starts if own)
    return RowPlan(width, row_count(needed), starts)


def packing_of(plan: RowPlan, arriving: Arriving, slots: int, pad_id: int) -> Packing[np.ndarray]:
    """Arrays of the packed rows.

    Args:
      slots: total number.
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
        # Ranks have equal ranges of slots, so a slot's index determines its rank.
        ends[slot] = plan.starts[slot * ranks // slots][source] + request.length - 1
    tokens, segments, positions = (x.reshape(-1, plan.width) for x in (tokens, segments, positions))
    return Packing(tokens, segments, positions, ends)


def copies_of(
    plan: RowPlan, arriving: Arriving, slots: int, columns: int, cache_columns: int
) -> Copies[np.ndarray]:
    """Copies from packed rows into the KV cache.

    Args:
      slots: total number.
      columns: tokens of the longest row.
      cache_columns: length of the cache, at least that of the longest prompt.
    """
    ranks = len(plan.starts)
    per_rank, size = slots // ranks, min(CHUNK, cache_columns)
    planned: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for slot, request, source in arriving.seats:
        rank, own = divmod(slot, per_rank)
        start = plan.starts[rank][source]
        # The last copies of a slot overlap if its length is no multiple of their size.
        places = (min(c, cache_columns - size) for c in range(0, request.length, size))
        planned[rank] += [(own, start + column, column) for column in places]
    # A static shape for the maximum; `number` counts the actual copies.
    room = per_rank * -(-columns // min(CHUNK, columns))
    copies = np.zeros((ranks, room, 3), np.int32)
    for rank, own in enumerate(planned):
        copies[rank, : len(own)] = np.reshape(own, (-1, 3))
    number = np.array(list(map(len, planned)), np.int32)
    own_slots, begins, into = np.moveaxis(copies.reshape(-1, 3), 1, 0)
    return Copies(own_slots, begins, into, number)
