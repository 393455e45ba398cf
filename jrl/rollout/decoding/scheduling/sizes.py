"""Sizes that decoding is compiled for: prefill rows, slots of a step, and lengths of the KV cache.

Each size is a compiled function, so that there are few of each; lists of sizes are ascending. Of
the arguments, `max_length` is the tokens of the longest row, `per_rank` the slots of a rank, `unit`
a divisor of the sizes, and `most_tokens` the approximate number of tokens in one prefill of a rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

MIN_PREFILL_WIDTH = 16
"""Minimum width of a prefill: narrower ones would not be faster."""
SINGLE_ROW_UNIT, MAX_SINGLE_ROW_MULTIPLE = 64, 6
"""Unit and maximum multiple of the width of a single row for all prompts, of any lengths: in longer
rows the attention scores between different prompts cost more than padding."""
MIN_SHARED_WIDTH = 128
"""Minimum width if prompts share multiple rows: attention computes scores between all tokens of
a row."""

SHRINK_FACTOR, MIN_ACTIVE_SLOTS = 4, 8
"""Factor by which a step computes fewer slots when most rows have ended, twice at most, and the
minimum per rank: fewer than `MIN_ACTIVE_SLOTS` take as long."""
STREAM_SHRINK_FACTOR = 8
"""Factor by which a step computes fewer slots in serving, repeatedly."""
MIN_LENGTH_TO_SHRINK = 128
"""Minimum length of rows for which it pays to compile steps with fewer slots."""

MIN_CACHE_LENGTH = 64
"""Minimum positions of the cache that are read, if there are so many."""
MIN_WINDOW = 16
"""Tokens of each row that are worth a return to the host: a window is shortened to no fewer, or to
the requested ones, if that lets attention read a shorter cache."""
MIN_STREAM_CACHE_LENGTH = 128
"""Minimum length of the cache in serving, if rows may be so long; 1.5 times, twice that, and so on
for longer rows: a step reads the whole cache."""


def bucket(
    size: int, most: int | None = None, least: int = MIN_PREFILL_WIDTH, factor: int = 2
) -> int:
    """Rounds `size` up to `least` times a power of `factor`, but no more than `most`."""
    while least < size:
        least *= factor
    return least if most is None else min(least, most)


def step_sizes(per_rank: int, max_length: int, unit: int) -> list[int]:
    """Slots of a rank that a step may compute (`fewer_slots`), for rows of one rollout with at most
    `max_length` tokens."""
    # Short rows end before a step with fewer slots has paid for its compilation.
    shrinks = max_length >= MIN_LENGTH_TO_SHRINK
    least = max(MIN_ACTIVE_SLOTS, per_rank // SHRINK_FACTOR**2) if shrinks else per_rank
    return fewer_slots(per_rank, unit, SHRINK_FACTOR, least)


def stream_step_sizes(per_rank: int, max_length: int, unit: int) -> list[int]:
    """Slots of a rank that a step may compute (`fewer_slots`) in serving."""
    return fewer_slots(per_rank, unit, STREAM_SHRINK_FACTOR, least=1)


def fewer_slots(per_rank: int, unit: int, fewer: int, least: int) -> list[int]:
    """Numbers of slots of a rank that a step may compute: all, and repeatedly `fewer` times fewer,
    which are multiples of `unit` and no fewer than `least`."""
    sizes = [per_rank]
    while sizes[0] // fewer >= max(least, unit):
        sizes.insert(0, -(-sizes[0] // fewer // unit) * unit)
    return sizes


def row_widths(max_length: int, unit: int) -> list[int]:
    """All widths of packed rows: `SINGLE_ROW_UNIT` for a single row of all prompts, which
    `single_row_widths` multiplies, then `MIN_SHARED_WIDTH` times powers of two, up to the longest
    row."""
    widths = [min(SINGLE_ROW_UNIT, max_length), min(MIN_SHARED_WIDTH, max_length)]
    while widths[-1] < max_length:
        widths.append(min(2 * widths[-1], max_length))
    return sorted({-(-width // unit) * unit for width in widths})


def single_row_widths(widths: Sequence[int], tokens: int | None = None) -> list[int]:
    """Widths, multiples of the first of `row_widths`, of a single row that holds `tokens`; all for
    None."""
    # Not the exact length, though it would not need padding: each width is a compiled function.
    multiples = (widths[0] * times for times in range(1, MAX_SINGLE_ROW_MULTIPLE + 1))
    return [width for width in multiples if tokens is None or width >= tokens]


def shared_width(widths: Sequence[int], longest: int) -> int:
    """Width, of `row_widths`, of rows that pack prompts of up to `longest` tokens with others."""
    return next((w for w in widths[1:] if w >= longest), widths[-1])


def row_count(least: int) -> int:
    """Rounds a number of rows up to a power of two, for which functions are compiled; 0 is 0."""
    return bucket(least, least=1) if least else 0


def row_sizes(widths: Sequence[int], per_rank: int, most_tokens: int) -> list[tuple[int, int]]:
    """All widths and numbers of rows in a packed prefill of a rank, each pair of which is a
    compiled function: one row, and multiple rows if one is not enough; `widths` are
    `row_widths`."""
    single_widths = single_row_widths(widths)
    sizes = [(width, 1) for width in single_widths]
    for width in widths[1:] or widths:
        row_numbers = _row_numbers(width, per_rank, most_tokens)
        sizes += [(width, rows) for rows in row_numbers if width * rows > single_widths[-1]]
    return sizes


def unpacked_row_sizes(
    max_length: int, unit: int, per_rank: int, most_tokens: int
) -> list[tuple[int, int]]:
    """All widths and numbers of rows in a prefill if each prompt has a row of its own."""
    widths = [min(MIN_PREFILL_WIDTH, max_length)]
    while widths[-1] < max_length:
        widths.append(min(2 * widths[-1], max_length))
    widths = sorted({-(-width // unit) * unit for width in widths})
    return [(w, rows) for w in widths for rows in _row_numbers(w, per_rank, most_tokens)]


def _row_numbers(width: int, per_rank: int, most_tokens: int) -> list[int]:
    """Numbers of rows of this width that a rank may run in one prefill."""
    most = row_count(min(per_rank, max(1, most_tokens // width)))
    return [2**power for power in range(most.bit_length())]


def stream_cache_lengths(max_length: int) -> list[int]:
    """Lengths that the cache may have in serving."""
    lengths = [min(MIN_STREAM_CACHE_LENGTH, max_length)]
    while lengths[-1] < max_length:
        half_again = lengths[-1] * 3 // 2
        lengths += [min(length, max_length) for length in (half_again, 2 * lengths[-1])]
    return sorted({*lengths})


def cache_length_to_read(end: int, cache_length: int) -> int:
    """Cache length for rows that end at `end`: `MIN_CACHE_LENGTH` times a power of two, or all.

    Args:
      cache_length: length of the whole cache.
    """
    read = bucket(end, cache_length, MIN_CACHE_LENGTH)
    # A part of the cache is copied, before and after its steps; the whole cache is not.
    return read if 3 * read <= 2 * cache_length else cache_length


def plan_window(
    lengths: np.ndarray, limits: np.ndarray, window: int, cache_length: int
) -> tuple[int, int]:
    """Number of tokens to decode in all rows, `window` or as many as a shorter cache holds, and the
    maximum length of the longest row after them.

    Args:
      lengths: ``[row]`` lengths of the rows that continue.
      limits: ``[row]`` lengths at which they stop.
      cache_length: length of the whole cache.
    """
    few = cache_length_to_read(length_after(lengths, limits, min(MIN_WINDOW, window)), cache_length)
    if few < cache_length_to_read(length_after(lengths, limits, window), cache_length):
        # Rows that stop within these positions do not matter: others get at least `MIN_WINDOW`
        # tokens.
        window = few - 1 - int(lengths[limits > few].max())
    return window, length_after(lengths, limits, window)


def length_after(lengths: np.ndarray, limits: np.ndarray, num_tokens: int) -> int:
    """Maximum length of the longest row after `num_tokens` more tokens."""
    # One more: a row that was just admitted has a first token that the host has not counted.
    return int(np.minimum(lengths + 1 + num_tokens, limits).max())


@dataclass(frozen=True)
class EnginePolicy:
    """Policy of an engine: how much it runs at a time, and the sizes of its compiled functions.

    Attributes:
      prefill_tokens: approximate number of prompt tokens in one prefill of a rank. It bounds the
        memory, and in serving the time that rows in flight wait.
      cache_sizes: lengths that the KV cache may have for rows of at most `max_length` tokens.
      step_sizes: slots of a rank that a step may compute, by `per_rank`, `max_length` and `unit`.
      prefill_prompts: usual number of prompts at a time: larger requests run in prefills of this
        many, not in one of their own size. None runs as many at once as `prefill_tokens` allow.
      packs_prompts: true if prompts share the rows of a prefill.
      resizes_cache: true if the KV cache follows the longest row and each step reads all of it.
        False if it has columns for the longest row and a step reads as much as its rows need.
      reproducible: true if samples depend on the requests only, bit for bit. False if they may
        depend on earlier requests too, for example through the placement of experts.
      min_prefix: fewest first tokens of a request that are taken from the cache of a slot
        (`PrefixCache`); None runs all.
    """

    prefill_tokens: int
    cache_sizes: Callable[[int], list[int]]
    step_sizes: Callable[[int, int, int], list[int]]
    prefill_prompts: int | None = None
    packs_prompts: bool = False
    resizes_cache: bool = False
    reproducible: bool = True
    min_prefix: int | None = None


ROLLOUTS = EnginePolicy(2**15, cache_sizes=lambda max_length: [max_length], step_sizes=step_sizes)
"""Policy of rollouts: many requests come at once, and their results are reproducible."""
SERVING = EnginePolicy(
    1024,
    cache_sizes=stream_cache_lengths,
    step_sizes=stream_step_sizes,
    packs_prompts=True,
    resizes_cache=True,
    reproducible=False,
    min_prefix=32,
)
"""Policy of a server: requests come at any time, and rows in flight wait for each prefill."""
