"""Sizes of mini-batches and micro-batches that follow from how many completions there are."""

import math

MINI_BATCH, MICRO_BATCH = 128, 64
"""What mini-batches and micro-batches are near to where nobody chose their size."""


def near_divisors(number: int, aim: int) -> list[int]:
    """All divisors of `number`, those nearest to `aim` in ratio first; of two, the smaller.

    Examples:
      >>> near_divisors(80, 64)[:3]
      [80, 40, 20]
    """
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return sorted(divisors, key=lambda size: (abs(math.log(size / aim)), size))
