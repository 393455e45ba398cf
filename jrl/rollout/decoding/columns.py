"""Cache length that attention reads in decoding steps, by the lengths of the rows."""

import numpy as np

from jrl.rollout.decoding.scheduler import bucket

MIN_CACHE_LENGTH = 64
"""Minimum positions of the cache that are read, if there are so many."""
MIN_WINDOW = 16
"""Tokens of each row that are worth a return to the host: a window is shortened to no fewer, or to
the requested ones, if that lets attention read a shorter cache."""


def cache_length_to_read(end: int, columns: int) -> int:
    """Cache length for rows that end at `end`: `MIN_CACHE_LENGTH` times a power of two, or all.

    Args:
      columns: total length of the cache.
    """
    read = bucket(end, columns, MIN_CACHE_LENGTH)
    # A part of the cache is copied, before and after its steps; the whole cache is not.
    return read if 3 * read <= 2 * columns else columns


def plan_window(
    lengths: np.ndarray, limits: np.ndarray, window: int, columns: int
) -> tuple[int, int]:
    """Number of tokens to decode in all rows, `window` or as many as a shorter cache holds, and the
    maximum length of the longest row after them.

    Args:
      lengths: ``[row]`` of the rows that continue.
      limits: ``[row]`` lengths at which they stop.
      columns: total length of the cache.
    """
    few = cache_length_to_read(length_after(lengths, limits, min(MIN_WINDOW, window)), columns)
    if few < cache_length_to_read(length_after(lengths, limits, window), columns):
        # Rows that stop within these positions do not matter: others get at least `MIN_WINDOW`
        # tokens.
        window = few - 1 - int(lengths[limits > few].max())
    return window, length_after(lengths, limits, window)


def length_after(lengths: np.ndarray, limits: np.ndarray, num_tokens: int) -> int:
    """Maximum length of the longest row after `num_tokens` more tokens."""
    # One more: a row that was just admitted has a first token that the host has not counted.
    return int(np.minimum(lengths + 1 + num_tokens, limits).max())
