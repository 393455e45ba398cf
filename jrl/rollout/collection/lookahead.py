"""Asynchronous rollouts: the next batch is finished while rows of later batches are started.

The schedule of sampling depends on counts and never on the clock: a run has the same result whether
it samples and trains alternately or concurrently, and when it is resumed after a kill.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from jrl.recipes.base.collection import DynamicSampling
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.collection.ahead import Drawn, row_of
from jrl.rollout.collection.collect import (
    chosen_of,
    generation_metrics,
    sampling_of,
    verifier_counts,
)
from jrl.rollout.collection.dynamic_sampling import Groups
from jrl.rollout.decoding.requests import Request, taken_off
from jrl.rollout.sampler import Completion, Sampler, Unverified, in_order


class LookAhead(Groups):
    """Samples until the next batch is complete, and rows of later batches in the meantime.

    Prompts are started in their order: first those that the next batch needs in any case. Beyond
    the first prompt that the batch can end with, as many prompts are started as the further batches
    in flight have: whatever the verdicts are, none of them belongs to a later batch.

    Args:
      sampler, recipe, seconds: as of `Groups`.
      batches: maximum number in flight, the next one included.
      first: id of the first prompt of the next batch.
      keep_pool: true if rows in flight keep their KV cache.
    """

    def __init__(
        self,
        sampler: Sampler,
        recipe: Recipe,
        *,
        batches: int,
        first: int,
        keep_pool: bool = False,
        seconds: dict[str, float],
    ):
        super().__init__(sampler, recipe, sampling_of(recipe), seconds)
        self._first, self._asked, self._keep_pool = first, first, keep_pool
        self._beyond = (batches - 1) * recipe.prompts
        collection = recipe.collection
        self._compares = isinstance(collection, DynamicSampling)
        rounds = collection.max_rounds if isinstance(collection, DynamicSampling) else 1
        self._last = first + rounds * recipe.prompts
        self._ended = Counter[int]()

    def draw(self, pending: list[Completion | Request]) -> Drawn:
        """Samples the next batch.

        Args:
          pending: rows of its prompts and later ones that an earlier call left over.
        """
        # The oldest rows first: they are in the queue before all requests below.
        self._go_on(pending)
        self._ask()
        # Requests after each poll follow from counts, and so do the weights that sample them.
        while not self._whole():
            trajectories, before = self._polled(), self._drawn
            if trajectories and self._compares:
                self._drawn = Unverified(self._sampler.task, self._seconds)
            if trajectories:
                self._sampler.judge(self._drawn, trajectories, self._examples)
                self._ended.update(t.request.prompt for t in trajectories)
            if self._compares:
                # Verdicts of one poll are awaited after the next poll: computed meanwhile, and read
                # at the same point whether the verifier is fast or slow.
                self._learn(before.verified())
            self._ask()
        self._learn(self._drawn.verified())
        # Rows of later batches are suspended, and continue with the next weights.
        return self._divided(self._sampler.engine.suspend(self._keep_pool))

    def _go_on(self, pending: list[Completion | Request]) -> None:
        """Restores the rows that an earlier call left over."""
        for row in pending:
            number = row_of(row).prompt
            self._examples[number] = self._sampler.task.train(number)
            self._asked = max(self._asked, number + 1)
        done = [row for row in pending if isinstance(row, Completion)]
        self._ended.update(row_of(row).prompt for row in done)
        self._learn(done)
        requests = [row for row in pending if isinstance(row, Request)]
        self._sampler.engine.submit(requests, self._sampling)

    def _end(self) -> int:
        """End of the next batch's prompt ids, if all undecided groups are informative."""
        found = 0
        for number in range(self._first, self._last):
            # Undecided groups are assumed to be informative: the batch cannot end sooner, and
            # prompts up to there are needed whatever the verdicts are.
            found += self._informative.get(number, True)
            if found == self._recipe.prompts:
                return number + 1
        return self._last

    def _ask(self) -> None:
        """Submits the prompts that may be started."""
        numbers = range(self._asked, self._end() + self._beyond)
        self._begin(numbers)
        self._asked = max(self._asked, numbers.stop)

    def _whole(self) -> bool:
        """True if the next batch is complete; its last prompt is then determined."""
        numbers = range(self._first, self._end())
        if self._compares:
            return all(number in self._informative for number in numbers)
        # Without dynamic sampling the batch does not depend on verdicts: they are awaited once, at
        # the end.
        return all(self._ended[number] == self._recipe.group_size for number in numbers)

    def _divided(self, suspended: list[Request]) -> Drawn:
        """Splits the rows into the next batch and pending rows, which include unfinished ones."""
        end = self._end()
        assert all(request.prompt >= end for request in suspended), "a batch lacks rows"
        numbers = range(self._first, end)
        drawn = in_order([each for number in numbers for each in self._groups[number]])
        informative = np.array([self._informative.get(number, True) for number in numbers])
        ready, counts = chosen_of(self._recipe, drawn, informative)
        metrics = verifier_counts(drawn)
        if self._compares:
            metrics |= generation_metrics(self._recipe, informative, counts)
        later = [each for number in self._groups if number >= end for each in self._groups[number]]
        # To the host: they become a part of the state, which outlives the engine's output buffers.
        kept = _off_the_mesh([*ready, *later])
        pending: list[Completion | Request] = [*kept[len(ready) :], *suspended]
        pending.sort(key=lambda row: (row_of(row).prompt, row_of(row).sample))
        return Drawn(kept[: len(ready)], counts, end, metrics, pending)


def _off_the_mesh(completions: list[Completion]) -> list[Completion]:
    moved = taken_off([completion.trajectory for completion in completions])
    pairs = zip(completions, moved, strict=True)
    return [replace(each, trajectory=trajectory) for each, trajectory in pairs]
