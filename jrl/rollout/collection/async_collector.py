"""Asynchronous rollouts: the next batch is finished while rows of later batches are started.

The schedule of sampling depends on counts and never on the clock: a run has the same result whether
it samples and trains alternately or concurrently, and when it is resumed after a kill.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from jrl.recipes.base.recipe import DynamicSampling, Recipe
from jrl.rollout.collection.async_buffer import AsyncRollouts, row_of
from jrl.rollout.collection.collect import (
    generation_metrics,
    sampling_of,
    select_completions,
    verifier_counts,
)
from jrl.rollout.collection.dynamic_sampling import Groups
from jrl.rollout.decoding.requests import Request, move_to_host
from jrl.rollout.sampler import Completion, Sampler, Unverified, sort_completions


class AsyncCollector(Groups):
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
        self._first, self._next_prompt, self._keep_pool = first, first, keep_pool
        self._beyond = (batches - 1) * recipe.prompts
        collection = recipe.collection
        self._compares = isinstance(collection, DynamicSampling)
        rounds = collection.max_rounds if isinstance(collection, DynamicSampling) else 1
        self._last = first + rounds * recipe.prompts
        self._ended = Counter[int]()

    def collect_batch(self, pending: list[Completion | Request]) -> AsyncRollouts:
        """Samples the next batch.

        Args:
          pending: rows of its prompts and later ones that an earlier call left over.
        """
        # The oldest rows first: they are in the queue before all requests below.
        self._resume_rows(pending)
        self._submit_prompts()
        # Requests after each poll follow from counts, and so do the weights that sample them.
        while not self._is_complete():
            trajectories, before = self._poll_engine(), self._unverified
            if trajectories and self._compares:
                self._unverified = Unverified(self._sampler.task, self._seconds)
            if trajectories:
                self._sampler.judge(self._unverified, trajectories, self._examples)
                self._ended.update(t.request.prompt for t in trajectories)
            if self._compares:
                # Verdicts of one poll are awaited after the next poll: computed meanwhile, and read
                # at the same point whether the verifier is fast or slow.
                self._add_verified(before.wait())
            self._submit_prompts()
        self._add_verified(self._unverified.wait())
        # Rows of later batches are suspended, and continue with the next weights.
        return self._split_batch(self._sampler.engine.suspend(self._keep_pool))

    def _resume_rows(self, pending: list[Completion | Request]) -> None:
        """Restores the rows that an earlier call left over."""
        for row in pending:
            prompt = row_of(row).prompt
            self._examples[prompt] = self._sampler.task.train(prompt)
            self._next_prompt = max(self._next_prompt, prompt + 1)
        done = [row for row in pending if isinstance(row, Completion)]
        self._ended.update(row_of(row).prompt for row in done)
        self._add_verified(done)
        requests = [row for row in pending if isinstance(row, Request)]
        self._sampler.engine.submit(requests, self._sampling)

    def _end(self) -> int:
        """End of the next batch's prompt ids, if all undecided groups are informative."""
        num_informative = 0
        for prompt in range(self._first, self._last):
            # Undecided groups are assumed to be informative: the batch cannot end sooner, and
            # prompts up to there are needed whatever the verdicts are.
            num_informative += self._informative.get(prompt, True)
            if num_informative == self._recipe.prompts:
                return prompt + 1
        return self._last

    def _submit_prompts(self) -> None:
        """Submits the prompts that may be started."""
        prompts = range(self._next_prompt, self._end() + self._beyond)
        self._submit_groups(prompts)
        self._next_prompt = max(self._next_prompt, prompts.stop)

    def _is_complete(self) -> bool:
        """True if the next batch is complete; its last prompt is then determined."""
        prompts = range(self._first, self._end())
        if self._compares:
            return all(prompt in self._informative for prompt in prompts)
        # Without dynamic sampling the batch does not depend on verdicts: they are awaited once, at
        # the end.
        return all(self._ended[prompt] == self._recipe.group_size for prompt in prompts)

    def _split_batch(self, suspended: list[Request]) -> AsyncRollouts:
        """Splits the rows into the next batch and pending rows, which include unfinished ones."""
        end = self._end()
        assert all(request.prompt >= end for request in suspended), (
            "the next batch has unfinished rows"
        )
        prompts = range(self._first, end)
        completions = sort_completions(
            [each for prompt in prompts for each in self._groups[prompt]]
        )
        informative = np.array([self._informative.get(prompt, True) for prompt in prompts])
        ready, counts = select_completions(self._recipe, completions, informative)
        metrics = verifier_counts(completions)
        if self._compares:
            metrics |= generation_metrics(self._recipe, informative, counts)
        later = [each for prompt in self._groups if prompt >= end for each in self._groups[prompt]]
        # To the host: they become a part of the state, which outlives the engine's output buffers.
        on_host = _move_to_host([*ready, *later])
        pending: list[Completion | Request] = [*on_host[len(ready) :], *suspended]
        pending.sort(key=lambda row: (row_of(row).prompt, row_of(row).sample))
        return AsyncRollouts(on_host[: len(ready)], counts, end, metrics, pending)


def _move_to_host(completions: list[Completion]) -> list[Completion]:
    moved = move_to_host([completion.trajectory for completion in completions])
    pairs = zip(completions, moved, strict=True)
    return [replace(each, trajectory=trajectory) for each, trajectory in pairs]
