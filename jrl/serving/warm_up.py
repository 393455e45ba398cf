"""Warm-up: compiles the engine's functions in advance, so that few requests wait for it.

The functions of short requests are compiled before the first request, and all others while the
server is idle.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jrl.rollout.adjustments import Adjustments
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.requests import Request
from jrl.rollout.sampling import RequestSampling

ANY_ADJUSTMENTS = Adjustments(presence_penalty=0.5)
"""Adjustments with arbitrary values, as all share the compiled functions."""
SHORT_PROMPT = 128
"""Maximum tokens of a prompt of a short request."""


class Trial(NamedTuple):
    """Warm-up prompts, of which an engine samples one token.

    Attributes:
      lengths: of the prompts of each rank.
      samples: of each.
      top_logprobs: true if top log-probabilities are requested.
      other: true for adjustments of the logits if a request by default has none, and the reverse.
      extends: true to run the prompts once more with two tokens behind them, from the prefix cache.
    """

    lengths: tuple[int, ...]
    samples: int = 1
    top_logprobs: bool = False
    other: bool = False
    extends: bool = False


class WarmUp:
    """Compiles the functions of an engine by trial requests.

    Args:
      engine: idle whenever this runs it.
      next_id: returns an id that no prompt in the engine has.
      token: the token of which the prompts consist.
      longest: most tokens of a prompt.
      window: tokens of a row between two scheduler steps.
      adjustments: of a request that names none; None if there are none.
    """

    def __init__(
        self,
        engine: Engine,
        next_id: Callable[[], int],
        token: int,
        longest: int,
        window: int,
        adjustments: Adjustments | None = None,
    ):
        self._engine, self._next_id, self._token = engine, next_id, token
        self._window, self._adjustments = window, adjustments
        common, later = plan_trials(engine, longest)
        self._common, self._later = deque(common), deque(later)

    @property
    def num_left(self) -> int:
        """Trials that have not been run."""
        return len(self._common) + len(self._later)

    def compile_common(self) -> None:
        """Compiles the functions of short requests."""
        while self._common:
            self._run_trial(self._common[0])
            self._common.popleft()
        # Cancellation, as of a client that leaves: at least one of so many choices is running.
        prompt_id, samples = self._next_id(), range(self._engine.slots)
        ids = np.full(1, self._token, np.int32)
        sampling = RequestSampling(adjustments=self._adjustments)
        requests = [
            Request(prompt_id, n, ids, self._window + 2, sampling=sampling) for n in samples
        ]
        self._engine.submit(requests)
        self._engine.stream(self._window)
        self._engine.cancel([prompt_id])

    def compile_next(self) -> None:
        """Runs one of the trials that are left; at least one must be."""
        self._run_trial(self._later[0])
        self._later.popleft()

    def skip(self) -> None:
        """Discards all trials, so that requests compile what they need."""
        self._common.clear()
        self._later.clear()

    def _run_trial(self, trial: Trial) -> None:
        engine, samples = self._engine, range(trial.samples)
        adjustments = self._adjustments
        if trial.other:
            adjustments = ANY_ADJUSTMENTS if adjustments is None else None
        sampling = RequestSampling(
            0.7, 0.9, needs_top_tokens=trial.top_logprobs, adjustments=adjustments
        )
        for more in (0, 2)[: 1 + trial.extends]:
            for length in np.repeat(trial.lengths, engine.ranks):
                prompt_id, ids = self._next_id(), np.full(length + more, self._token, np.int32)
                engine.submit(
                    [Request(prompt_id, sample, ids, 1, sampling=sampling) for sample in samples]
                )
            while engine.busy:
                engine.stream(self._window)
        # All prompts begin with the same tokens, and each size of prefill is to be run.
        engine.scheduler.clear_prefix_cache()


def plan_trials(engine: Engine, longest: int) -> tuple[list[Trial], list[Trial]]:
    """Trials of short requests, and all others: each size of the rows, the step and the cache.

    Those that sample are run with adjustments of the logits and without. `longest` is the most
    tokens of a prompt.
    """
    common = [Trial((1,), top_logprobs=True)]
    narrowest, *wider = engine.cache_sizes
    # Decode steps over all slots and over fewer of them.
    samples = [1 + fewer for fewer in (0, *engine.step_sizes[:-1])]
    common += [Trial((1,), num_samples) for num_samples in samples[1:]]
    fitting_length = min(longest, narrowest - 1)
    common += _prefill_trials(engine, min(fitting_length, SHORT_PROMPT))
    # More choices than slots: the last starts as a copy of the others.
    copy_trial = Trial((1,), engine.slots + 1)
    later = [*_extension_trials(engine, fitting_length), *_prefill_trials(engine, fitting_length)]
    later.append(copy_trial)
    # While the cache has its size; copies too, which sample as well.
    other_copy_trial = copy_trial._replace(other=True)
    later += [Trial((1,), number, other=True) for number in samples]
    later.append(other_copy_trial)
    for size in wider:
        # The widest first: the cache then has this size, and keeps it for some time.
        widest = min(size - 1, longest)
        later += [Trial((widest,), num_samples) for num_samples in samples]
        later += _extension_trials(engine, widest)
        later += reversed(_prefill_trials(engine, widest))
        later.append(copy_trial)
        later += [Trial((widest,), number, other=True) for number in samples]
        later.append(other_copy_trial)
    return common, later


def _extension_trials(engine: Engine, longest: int) -> list[Trial]:
    """Trial of two choices that begin with tokens of another: one continues it in its slot, and one
    in a copy."""
    prefixes = engine.scheduler.prefixes
    if prefixes is None or longest < prefixes.min_tokens + 3:
        return []
    return [Trial((longest - 2,), min(2, engine.slots), extends=True)]


def _prefill_trials(engine: Engine, longest: int) -> list[Trial]:
    """Trials of all prefill sizes, with prompts no longer than `longest`."""
    per_rank = engine.slots // engine.ranks
    prompt_lengths = (fill_prompts(*size, longest, per_rank) for size in engine.prefill_sizes)
    return [Trial(lengths) for lengths in dict.fromkeys(prompt_lengths)]


def fill_prompts(width: int, rows: int, longest: int, max_prompts: int) -> tuple[int, ...]:
    """Lengths of at most `max_prompts` prompts, none over `longest`, for which the engine prefills
    rows of this width and number, if there are any."""
    row = [longest] * (width // longest) + [width % longest] * (width % longest > 0)
    lengths = tuple(row) * rows
    if len(lengths) <= max_prompts:
        return lengths
    return (min(width, longest),) * min(rows, max_prompts)
