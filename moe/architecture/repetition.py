"""After how many layers their kinds come again."""

from collections.abc import Hashable, Sequence


def period_of(kinds: Sequence[Hashable]) -> int:
    """The least number of layers of which the stack is a whole number of repetitions; that of all
    where it repeats nothing.

    Args:
      kinds: of the layers of a stack, in order.
    """
    depth = len(kinds)
    return next(
        period
        for period in range(1, depth + 1)
        if depth % period == 0 and list(kinds) == list(kinds[:period]) * (depth // period)
    )
