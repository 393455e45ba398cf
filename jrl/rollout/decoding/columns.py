"""How many columns of the cache attention reads while rows go on."""

import numpy as np

from jrl.rollout.decoding.seating import bucket

NARROWEST = 64
"""Columns that are read at least, if there are so many."""
FEW = 16
"""Tokens of each row that are worth a look of the host: rows go on by no more than that or what is
asked for, if fewer columns hold them."""


def columns_read(end: int, columns: int) -> int:
    """How many columns hold rows that end at `end`: `NARROWEST` times a power of two, or all.

    Args:
      columns: that there are.
    """
    read = bucket(end, columns, NARROWEST)
    # A part is copied, there and back, for the steps that read it; all of them are not.
    return read if 3 * read <= 2 * columns else columns


def reach(lengths: np.ndarray, limits: np.ndarray, window: int, columns: int) -> tuple[int, int]:
    """How many tokens all rows go on by, `window` or those that fewer columns hold, and where the
    longest row ends then at the latest.

    Args:
      lengths: ``[row]`` of the rows that go on.
      limits: ``[row]`` lengths at which they stop.
      columns: that there are.
    """
    few = columns_read(end_after(lengths, limits, min(FEW, window)), columns)
    if few < columns_read(end_after(lengths, limits, window), columns):
        # Rows that stop within these columns have no say: others go on by `FEW` tokens at least.
        window = few - 1 - int(lengths[limits > few].max())
    return window, end_after(lengths, limits, window)


def end_after(lengths: np.ndarray, limits: np.ndarray, number: int) -> int:
    """Where the longest of such rows ends after so many tokens, at the latest."""
    # One more: a row that has just come has a first token that the host has not counted.
    return int(np.minimum(lengths + 1 + number, limits).max())
