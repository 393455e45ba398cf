"""Packing of prompts into shared rows for prefill, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jrl.rollout.decoding.programs.packed import CHUNK, CacheCopies, Packing
from jrl.rollout.decoding.scheduler import (
    AdmissionPlan,
    bucket,
    first_fit,
    shared_width,
    single_row_widths,
)


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
      widths: of rows (`scheduler.row_widths`).
      per_rank: slots of a rank, which is the maximum number of prompts.
      most_tokens: approximate number of tokens in one prefill.
    """
    single_widths = single_row_widths(widths)
    sizes = [(width, 1) for width in single_widths]
    for width in widths[1:] or widths:
        row_numbers = _row_numbers(width, per_rank, most_tokens)
        sizes += [(width, rows) for rows in row_numbers if width * rows > single_widths[-1]]
    return sizes


def unpacked_row_sizes(
    widths: Sequence[int], per_rank: int, most_tokens: int
) -> list[tuple[int, int]]:
    """All widths and numbers of rows in a prefill where each prompt has a row of its own.

    Args:
      widths: of those rows, ascending.
    """
    return [(w, rows) for w in widths for rows in _row_numbers(w, per_rank, most_tokens)]


def _row_numbers(width: int, per_rank: int, most_tokens: int) -> list[int]:
    """Numbers of rows of this width that a rank may run in one prefill, ascending."""
    most = row_count(min(per_rank, max(1, most_tokens // width)))
    return [2**power for power in range(most.bit_length())]


def plan_rows(plan: AdmissionPlan, widths: Sequence[int]) -> RowPlan:
    """Plans packed rows by first fit, in the order of the prompts; one row if it holds all.

    Args:
      plan: with prompts to run.
      widths: allowed widths of rows (`scheduler.row_widths`).
    """
    lengths = [[len(ids) for ids in runs] for runs in plan.runs]
    width, *_ = single_row_widths(widths, max(map(sum, lengths))) or [
        shared_width(widths, max(map(max, filter(None, lengths))))
    ]
    starts = [first_fit(run_lengths, width) for run_lengths in lengths]
    # The maximum over ranks: the compiled function has one shape on all.
    needed = max(max(offsets) // width + 1 for offsets in starts if offsets)
    return RowPlan(width, row_count(needed), starts)


def make_packing(
    row_plan: RowPlan, plan: AdmissionPlan, slots: int, pad_id: int
) -> Packing[np.ndarray]:
    """Arrays of the packed rows.

    Args:
      slots: total number.
    """
    ranks = len(row_plan.starts)
    shape = ranks, row_plan.num_rows * row_plan.width
    tokens = np.full(shape, pad_id, np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for rank, (runs, starts) in enumerate(zip(plan.runs, row_plan.starts, strict=True)):
        for segment, (ids, start) in enumerate(zip(runs, starts, strict=True), 1):
            span = slice(start, start + len(ids))
            tokens[rank, span], segments[rank, span] = ids, segment
            positions[rank, span] = np.arange(len(ids))
    ends = np.zeros(slots, np.int32)
    for slot, request, source in plan.assignments:
        # Ranks have equal ranges of slots, so a slot's index determines its rank.
        ends[slot] = row_plan.starts[slot * ranks // slots][source] + request.length - 1
    tokens, segments, positions = (
        x.reshape(-1, row_plan.width) for x in (tokens, segments, positions)
    )
    return Packing(tokens, segments, positions, ends)


def plan_cache_copies(
    row_plan: RowPlan, plan: AdmissionPlan, slots: int, columns: int, cache_columns: int
) -> CacheCopies[np.ndarray]:
    """Copies from packed rows into the KV cache.

    Args:
      slots: total number.
      columns: tokens of the longest row.
      cache_columns: length of the cache, at least that of the longest prompt.
    """
    ranks = len(row_plan.starts)
    per_rank, size = slots // ranks, min(CHUNK, cache_columns)
    rank_copies: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for slot, request, source in plan.assignments:
        rank, local_slot = divmod(slot, per_rank)
        start = row_plan.starts[rank][source]
        # The last copies of a slot overlap if its length is no multiple of their size.
        offsets = (min(c, cache_columns - size) for c in range(0, request.length, size))
        rank_copies[rank] += [(local_slot, start + column, column) for column in offsets]
    # A static shape for the maximum; `counts` are the actual numbers of copies.
    max_copies = per_rank * -(-columns // min(CHUNK, columns))
    table = np.zeros((ranks, max_copies, 3), np.int32)
    for rank, rows in enumerate(rank_copies):
        table[rank, : len(rows)] = np.reshape(rows, (-1, 3))
    counts = np.array(list(map(len, rank_copies)), np.int32)
    targets, sources, first_columns = np.moveaxis(table.reshape(-1, 3), 1, 0)
    return CacheCopies(targets, sources, first_columns, counts)
