"""Length of the KV cache of an engine, from step to step."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from jrl.rollout.decoding.scheduling.sizes import cache_length_to_read, length_after, plan_window
from jrl.rollout.decoding.slots import SlotPool, with_cache_length
from moe.cache import KEY_COLUMN

STEPS_BEFORE_SHRINK = 32
"""Scheduler steps after which a cache that is longer than its rows need is shortened."""


class CacheSize:
    """Resizes the KV cache of a pool to its rows.

    Args:
      sizes: lengths that it may have, ascending; functions are compiled for each.
      resizes: true if it follows the longest row and a step reads all of it. False if it has
        columns for the longest possible row, of which a step reads as much as its rows need.
      reads_live_columns: true if a step reads no other columns, however long the cache is
        (`moe.cache.reads_live_columns`).
    """

    def __init__(self, sizes: Sequence[int], *, resizes: bool, reads_live_columns: bool):
        self.sizes, self.resizes = sizes, resizes
        self.reads_whole = resizes or reads_live_columns
        # Consecutive windows with a cache longer than needed.
        self._too_long = 0

    def size_of(self, length: int) -> int:
        """Length of a cache for rows of this many tokens."""
        return next(size for size in self.sizes if size >= length)

    def grow(self, pool: SlotPool[Array], length: int) -> SlotPool[Array]:
        """Pool with a cache of at least `length` positions."""
        if not self.resizes or length_of(pool) >= length:
            return pool
        return with_cache_length(pool, self.size_of(length))

    def plan_steps(
        self, lengths: np.ndarray, limits: np.ndarray, max_tokens: int, are_waiting: bool
    ) -> tuple[int, int]:
        """Tokens to decode in rows, at most `max_tokens`, and the length of the longest after.

        Args:
          lengths, limits: ``[row]`` as of `plan_window`.
          are_waiting: true if requests wait for a slot.
        """
        if self.reads_whole or are_waiting:
            # The whole window: no part of the cache is copied, or the scheduler runs again after a
            # few steps, when some rows have ended, and a copy for so few costs more than it saves.
            return max_tokens, length_after(lengths, limits, max_tokens)
        return plan_window(lengths, limits, max_tokens, self.sizes[-1])

    def length_to_read(self, length: int) -> int:
        """Positions that steps up to a length read of a cache that is not resized."""
        total = self.sizes[-1]
        return total if self.reads_whole else cache_length_to_read(length, total)

    def fit(
        self, pool: SlotPool[Array], length: int, num_cached: int
    ) -> tuple[SlotPool[Array], int]:
        """Pool with a cache for steps up to a length, and the number of positions to read.

        Args:
          num_cached: positions that a shorter cache would lose, and that may be needed again.
        """
        if not self.resizes:
            return pool, self.length_to_read(length)
        total = length_of(pool)
        needed = self.size_of(max(length, min(num_cached, total)))
        # Extended immediately, shortened only after a while: each change copies the whole cache.
        self._too_long = self._too_long + 1 if needed < total else 0
        if needed <= total and self._too_long < STEPS_BEFORE_SHRINK:
            return pool, total
        self._too_long = 0
        return with_cache_length(pool, needed), needed


def length_of(pool: SlotPool[Array]) -> int:
    """Columns of the KV cache of a pool."""
    return pool.cache.keys[0].shape[KEY_COLUMN]
