"""Period of the layer types of a stack."""

from collections.abc import Hashable, Sequence


def period_of(kinds: Sequence[Hashable]) -> int:
    """The smallest number of layers whose repetition gives the stack; the depth where nothing
    repeats.

    Args:
      kinds: types of the layers of a stack, in order.
    """
    depth = len(kinds)
    return next(
        period
        for period in range(1, depth + 1)
        if depth % period == 0 and list(kinds) == list(kinds[:period]) * (depth // period)
    )
