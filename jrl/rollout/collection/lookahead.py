"""Sampling ahead of training: the next batch is finished while rows of later ones are begun.

What is sampled when is decided by counts and never by the clock: a run is the same whether it
samples and learns by turns or at the same time, and when it goes on after a kill.
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
    """Samples until the next batch is whole, and meanwhile what may be sampled of later ones.

    Prompts are begun in their order. Those of the next batch are begun for sure; beyond the first
    that the batch can end with, so many prompts are begun as the batches have that may be under
    way: whatever the verdicts are, none of them belongs to a later batch.

    Args:
      sampler, recipe, seconds: as of `Groups`.
      batches: that may be under way, the next one included.
      first: number of the first prompt of the next batch.
      keep_pool: whether rows in flight keep their keys and values.
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
        """The next batch.

        Args:
          pending: what an earlier call left of its prompts and those after them.
        """
        # The oldest rows first: they wait in front of all that is asked for below.
        self._go_on(pending)
        self._ask()
        # What is asked for after each poll follows from counts, and so does what weights sample it.
        while not self._whole():
            trajectories, before = self._polled(), self._drawn
            if trajectories and self._compares:
                self._drawn = Unverified(self._sampler.task, self._seconds)
            if trajectories:
                self._sampler.judge(self._drawn, trajectories, self._examples)
                self._ended.update(t.request.prompt for t in trajectories)
            if self._compares:
                # Verdicts of one poll are waited for after the next: made meanwhile, and looked at
                # neither sooner nor later where the verifier is fast or slow.
                self._learn(before.verified())
            self._ask()
        self._learn(self._drawn.verified())
        # Rows of later batches stop where they are, and go on with the next weights.
        return self._divided(self._sampler.engine.suspend(self._keep_pool))

    def _go_on(self, pending: list[Completion | Request]) -> None:
        """Takes up what was left."""
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
        """The prompt after the next batch's, if all are informative of which it is not known."""
        found = 0
        for number in range(self._first, self._last):
            # What is not known yet counts as informative: the batch cannot end sooner, and prompts
            # up to there are needed whatever the verdicts are.
            found += self._informative.get(number, True)
            if found == self._recipe.prompts:
                return number + 1
        return self._last

    def _ask(self) -> None:
        """For the prompts that may be begun."""
        numbers = range(self._asked, self._end() + self._beyond)
        self._begin(numbers)
        self._asked = max(self._asked, numbers.stop)

    def _whole(self) -> bool:
        """Whether the next batch is: what it ends with is then known."""
        numbers = range(self._first, self._end())
        if self._compares:
            return all(number in self._informative for number in numbers)
        # Without dynamic sampling no verdict decides anything: they are waited for once, at the
        # end.
        return all(self._ended[number] == self._recipe.group_size for number in numbers)

    def _divided(self, suspended: list[Request]) -> Drawn:
        """The next batch, and the rest, rows among it that are not finished."""
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
        # To the host: they become a part of the state, which outlives the engine's shelves.
        kept = _off_the_mesh([*ready, *later])
        pending: list[Completion | Request] = [*kept[len(ready) :], *suspended]
        pending.sort(key=lambda row: (row_of(row).prompt, row_of(row).sample))
        return Drawn(kept[: len(ready)], counts, end, metrics, pending)


def _off_the_mesh(completions: list[Completion]) -> list[Completion]:
    moved = taken_off([completion.trajectory for completion in completions])
    pairs = zip(completions, moved, strict=True)
    return [replace(each, trajectory=trajectory) for each, trajectory in pairs]
