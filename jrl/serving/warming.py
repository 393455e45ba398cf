"""What requests will need, compiled before the first of them: few then wait for a compiler."""

from collections.abc import Callable

import numpy as np

from jrl.rollout.decoding.packing import row_count
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.seating import NARROWEST_ROW, bucket
from jrl.rollout.row_sampling import OwnSampling
from jrl.serving.engine import Engine


def compile_all(
    engine: Engine, next_number: Callable[[], int], token: int, longest: int, window: int
) -> None:
    """Has an engine that is idle write one token of rows of every size.

    Args:
      next_number: of a prompt, which none has that the engine knows.
      token: that the prompts are made of.
      longest: tokens of a prompt.
      window: tokens of a row between two looks.
    """

    def write(width: int, prompts: int, samples: int = 1) -> None:
        ids, own = np.full(width, token, np.int32), OwnSampling(0.7, 0.9, wants_likeliest=True)
        for _ in range(prompts):
            number = next_number()
            engine.ask([Request(number, sample, ids, 1, own=own) for sample in range(samples)])
        while engine.busy:
            engine.tick(window)

    for size in engine.cache_sizes:
        widest = min(size - 1, longest)
        # The widest first: the cache has this size then, and keeps it for some time.
        for width in reversed(_widths(widest)):
            most = max(1, min(engine.slots // engine.ranks, engine.most_tokens // width))
            counts = {row_count(count) for count in range(1, most + 1)}
            # Those of less than a row come into one of their own alone.
            for rows in sorted(counts if width > NARROWEST_ROW // 2 else {1}):
                if rows <= most:
                    write(width, rows * engine.ranks)
        for fewer in (0, *engine.step_sizes[:-1]):
            write(widest, 1, samples=fewer + 1)


def _widths(widest: int) -> list[int]:
    widths = [bucket(1, widest)]
    while widths[-1] < widest:
        widths.append(min(2 * widths[-1], widest))
    return widths
