"""What requests will need, compiled before they come: few then wait for a compiler.

What short requests need is compiled before the first of them, and all else while nobody asks.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jrl.rollout.decoding.requests import Request
from jrl.rollout.row_sampling import OwnSampling
from jrl.serving.engine import Engine

COMMON = 128
"""Tokens of the longest prompt of a short request."""


class Trial(NamedTuple):
    """Prompts that an engine writes one token of.

    Attributes:
      lengths: of the prompts of each rank.
      samples: of each.
      likeliest: whether the likeliest tokens are asked for.
    """

    lengths: tuple[int, ...]
    samples: int = 1
    likeliest: bool = False


class Warming:
    """The programs of an engine, compiled by trials.

    Args:
      engine: idle whenever this runs it.
      next_number: of a prompt, which none has that the engine knows.
      token: that the prompts are made of.
      longest: tokens of a prompt.
      window: tokens of a row between two looks.
    """

    def __init__(
        self,
        engine: Engine,
        next_number: Callable[[], int],
        token: int,
        longest: int,
        window: int,
    ):
        self._engine, self._next_number, self._token = engine, next_number, token
        self._window = window
        common, later = trials(engine, longest)
        self._common, self._later = deque(common), deque(later)

    @property
    def num_left(self) -> int:
        """Trials that have not been made."""
        return len(self._common) + len(self._later)

    def make_common(self) -> None:
        """Compiles what short requests need."""
        while self._common:
            self._make(self._common[0])
            self._common.popleft()
        # A client that leaves: of so many choices one goes on at least.
        number, samples = self._next_number(), range(self._engine.slots)
        ids, own = np.full(1, self._token, np.int32), OwnSampling()
        requests = [Request(number, n, ids, self._window + 2, own=own) for n in samples]
        self._engine.ask(requests)
        self._engine.tick(self._window)
        self._engine.drop([(number, sample) for sample in samples])

    def make_one(self) -> None:
        """Compiles a little of what is left, of which there must be something."""
        self._make(self._later[0])
        self._later.popleft()

    def skip(self) -> None:
        """Leaves what is not compiled to the requests that need it."""
        self._common.clear()
        self._later.clear()

    def _make(self, trial: Trial) -> None:
        engine, samples = self._engine, range(trial.samples)
        own = OwnSampling(0.7, 0.9, wants_likeliest=trial.likeliest)
        for length in np.repeat(trial.lengths, engine.ranks):
            number, ids = self._next_number(), np.full(length, self._token, np.int32)
            engine.ask([Request(number, sample, ids, 1, own=own) for sample in samples])
        while engine.busy:
            engine.tick(self._window)


def trials(engine: Engine, longest: int) -> tuple[list[Trial], list[Trial]]:
    """Those of short requests, and all others: each size of the rows, of the step and of the cache.

    Args:
      longest: tokens of a prompt.
    """
    common, later = [Trial((1,), likeliest=True)], list[Trial]()
    narrowest, *wider = engine.cache_sizes
    # Steps that compute all slots and fewer of them.
    samples = [1 + fewer for fewer in (0, *engine.step_sizes[:-1])]
    for number in samples[1:]:
        common.append(Trial((1,), number))
    fitting = min(longest, narrowest - 1)
    common += _fillings(engine, min(fitting, COMMON))
    later += _fillings(engine, fitting)
    # More choices than slots: the last begins as a copy of the others.
    copied = Trial((1,), engine.slots + 1)
    later.append(copied)
    for size in wider:
        # The widest first: the cache has this size then, and keeps it for some time.
        widest = min(size - 1, longest)
        later += [Trial((widest,), number) for number in samples]
        later += reversed(_fillings(engine, widest))
        later.append(copied)
    return common, later


def _fillings(engine: Engine, longest: int) -> list[Trial]:
    """Those of all sizes of rows, with prompts no longer than `longest`."""
    per_rank = engine.slots // engine.ranks
    found = (filling(*size, longest, per_rank) for size in engine.prefill_sizes)
    return [Trial(lengths) for lengths in dict.fromkeys(found)]


def filling(width: int, rows: int, longest: int, most: int) -> tuple[int, ...]:
    """Lengths of prompts that rows of this width, and so many of them, are taken for, if there are
    such prompts.

    Args:
      longest: that a prompt may be.
      most: prompts.
    """
    row = [longest] * (width // longest) + [width % longest] * (width % longest > 0)
    filled = tuple(row) * rows
    return filled if len(filled) <= most else (min(width, longest),) * min(rows, most)
