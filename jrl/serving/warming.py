"""Warm-up: compiles the engine's functions in advance, so that few requests wait for it.

The functions of short requests are compiled before the first request, and all others while the
server is idle.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jrl.rollout.decoding.requests import Request
from jrl.rollout.row_sampling import RequestSampling
from jrl.serving.engine import Engine

COMMON = 128
"""Tokens of the longest prompt of a short request."""


class Trial(NamedTuple):
    """Warm-up prompts, of which an engine samples one token.

    Attributes:
      lengths: of the prompts of each rank.
      samples: of each.
      likeliest: true if top log-probabilities are requested.
    """

    lengths: tuple[int, ...]
    samples: int = 1
    likeliest: bool = False


class Warming:
    """Compiles the functions of an engine by trial requests.

    Args:
      engine: idle whenever this runs it.
      next_number: returns an id that no prompt in the engine has.
      token: the token of which the prompts consist.
      longest: most tokens of a prompt.
      window: tokens of a row between two scheduler steps.
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
        """Trials that have not been run."""
        return len(self._common) + len(self._later)

    def make_common(self) -> None:
        """Compiles the functions of short requests."""
        while self._common:
            self._make(self._common[0])
            self._common.popleft()
        # Cancellation, as of a client that leaves: at least one of so many choices is running.
        number, samples = self._next_number(), range(self._engine.slots)
        ids, own = np.full(1, self._token, np.int32), RequestSampling()
        requests = [Request(number, n, ids, self._window + 2, sampling=own) for n in samples]
        self._engine.ask(requests)
        self._engine.tick(self._window)
        self._engine.drop([(number, sample) for sample in samples])

    def make_one(self) -> None:
        """Runs one of the trials that are left; at least one must be."""
        self._make(self._later[0])
        self._later.popleft()

    def skip(self) -> None:
        """Discards all trials, so that requests compile what they need."""
        self._common.clear()
        self._later.clear()

    def _make(self, trial: Trial) -> None:
        engine, samples = self._engine, range(trial.samples)
        own = RequestSampling(0.7, 0.9, needs_top_tokens=trial.likeliest)
        for length in np.repeat(trial.lengths, engine.ranks):
            number, ids = self._next_number(), np.full(length, self._token, np.int32)
            engine.ask([Request(number, sample, ids, 1, sampling=own) for sample in samples])
        while engine.busy:
            engine.tick(self._window)


def trials(engine: Engine, longest: int) -> tuple[list[Trial], list[Trial]]:
    """Trials of short requests, and all others: each size of the rows, the step and the cache.

    Args:
      longest: most tokens of a prompt.
    """
    common, later = [Trial((1,), likeliest=True)], list[Trial]()
    narrowest, *wider = engine.cache_sizes
    # Decode steps over all slots and over fewer of them.
    samples = [1 + fewer for fewer in (0, *engine.step_sizes[:-1])]
    for number in samples[1:]:
        common.append(Trial((1,), number))
    fitting = min(longest, narrowest - 1)
    common += _fillings(engine, min(fitting, COMMON))
    later += _fillings(engine, fitting)
    # More choices than slots: the last starts as a copy of the others.
    copied = Trial((1,), engine.slots + 1)
    later.append(copied)
    for size in wider:
        # The widest first: the cache then has this size, and keeps it for some time.
        widest = min(size - 1, longest)
        later += [Trial((widest,), number) for number in samples]
        later += reversed(_fillings(engine, widest))
        later.append(copied)
    return common, later


def _fillings(engine: Engine, longest: int) -> list[Trial]:
    """Trials of all prefill sizes, with prompts no longer than `longest`."""
    per_rank = engine.slots // engine.ranks
    found = (filling(*size, longest, per_rank) for size in engine.prefill_sizes)
    return [Trial(lengths) for lengths in dict.fromkeys(found)]


def filling(width: int, rows: int, longest: int, most: int) -> tuple[int, ...]:
    """Prompt lengths for which the engine prefills rows of this width and number, if there are any.

    Args:
      longest: most tokens of a prompt.
      most: prompts at most.
    """
    row = [longest] * (width // longest) + [width % longest] * (width % longest > 0)
    filled = tuple(row) * rows
    return filled if len(filled) <= most else (min(width, longest),) * min(rows, most)
