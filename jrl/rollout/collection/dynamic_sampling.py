"""Dynamic sampling (DAPO): groups are sampled until enough of them have unequal scores."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jrl.losses import informative_groups
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.decoding.requests import Trajectory
from jrl.rollout.sampler import (
    Completion,
    Sampler,
    Unverified,
    scores_of,
    sort_completions,
    timed,
)
from jrl.rollout.sampling import Sampling
from jrl.tasks import Example


class Groups:
    """Requested prompts with their completions and verdicts.

    Args:
      sampler: with the policy loaded.
      recipe: the number and size of groups.
      sampling: parameters of sampling.
      first: id of the first prompt of the batch.
      most: maximum number of its prompts.
      seconds: dictionary to which the time taken is added.
    """

    _compares = True  # true if verdicts decide which groups are informative

    def __init__(
        self,
        sampler: Sampler,
        recipe: Recipe,
        sampling: Sampling,
        first: int,
        most: int,
        seconds: dict[str, float],
    ):
        self._sampler, self._recipe, self._sampling = sampler, recipe, sampling
        self._prompts, self._seconds = range(first, first + most), seconds
        self._unverified = Unverified(sampler.task, seconds)
        self._examples: dict[int, Example] = {}
        self._groups: defaultdict[int, list[Completion]] = defaultdict(list)
        self._informative: dict[int, bool] = {}

    @property
    def _next_prompt(self) -> int:
        """First prompt that was not requested yet."""
        return self._prompts.start + len(self._examples)

    def _submit_until(self, end: int) -> None:
        """Submits the groups of all prompts before `end` that were not requested yet."""
        if self._next_prompt < end:
            prompts = range(self._next_prompt, end)
            fresh = {prompt: self._sampler.task.train(prompt) for prompt in prompts}
            self._examples |= fresh
            requests = self._sampler.requests(fresh, self._recipe.group_size)
            self._sampler.engine.submit(requests, self._sampling)

    def _poll(self) -> list[Trajectory]:
        """Polls the engine, and starts the verification of finished trajectories. If verdicts
        decide what is sampled, it waits for the verdicts of the previous poll: they were computed
        meanwhile, and are read at the same point whether the verifier is fast or slow."""
        with timed("timing_s/gen", self._seconds):
            trajectories = self._sampler.engine.poll()
        if trajectories:
            self._sampler.judge(self._unverified, trajectories, self._examples)
        if self._compares:
            # If nothing is in flight, only verdicts are missing.
            self._add_verified(self._unverified.wait(num_running=1 if trajectories else 0))
        return trajectories

    def _add_verified(self, completions: list[Completion]) -> None:
        for completion in completions:
            prompt = completion.trajectory.request.prompt
            group = self._groups[prompt]
            group.append(completion)
            # Complete groups only: a further completion may still have another score.
            if self._compares and len(group) == self._recipe.group_size:
                self._informative[prompt] = is_informative(group)

    def _needed(self) -> range:
        """Prompts of the batch if all groups without verdicts are informative. It cannot end
        sooner, so they are needed whatever the verdicts are."""
        num_informative = 0
        for prompt in self._prompts:
            # In the order of prompts: a later one that is verified sooner must not replace it, or
            # the batch would depend on the timing of verdicts.
            num_informative += self._informative.get(prompt, True)
            if num_informative == self._recipe.prompts:
                return range(self._prompts.start, prompt + 1)
        return self._prompts

    def _is_decided(self) -> bool:
        """True if verdicts have determined the prompts of the batch."""
        return all(prompt in self._informative for prompt in self._needed())

    def _sampled(self, prompts: range) -> tuple[list[Completion], np.ndarray]:
        """Completions of prompts, in their order, and ``[prompts]`` true for informative groups."""
        completions = [each for prompt in prompts for each in self._groups[prompt]]
        informative = [self._informative.get(prompt, True) for prompt in prompts]
        return sort_completions(completions), np.array(informative)


class DynamicSampler(Groups):
    """Requests prompts in order until enough of their groups are informative.

    The batch is made of the first prompts, up to the last that is needed. Idle slots prefetch
    prompts beyond those, as many as the fraction of informative groups so far suggests; surplus
    groups are dropped, and sampled again in the next step.
    """

    def find(self) -> tuple[list[Completion], np.ndarray]:
        """Samples until a step has enough informative groups, or the maximum number of prompts is
        reached. The result does not depend on the speed of the verifier.

        Returns:
          The completions of all needed prompts, in their order, and ``[prompts]`` true for groups
          with unequal scores.
        """
        while not self._is_decided():
            self._submit_prompts()
            self._poll()
        needed = self._needed()
        self._sampler.engine.cancel([prompt for prompt in self._examples if prompt not in needed])
        return self._sampled(needed)

    def _submit_prompts(self) -> None:
        """Submits all prompts that are certainly needed, and into idle slots those likely to be."""
        num_verified, num_informative = len(self._informative), sum(self._informative.values())
        num_unverified = len(self._examples) - num_verified
        # Plus one in numerator and denominator: the fraction is never 0, and defined at the start.
        likely = (num_informative + 1) / (num_verified + 1)
        expected = math.ceil(
            (self._recipe.prompts - num_informative - num_unverified * likely) / likely
        )
        idle_groups = self._sampler.engine.num_idle // self._recipe.group_size
        prefetched = self._next_prompt + min(expected, idle_groups)
        self._submit_until(min(max(self._needed().stop, prefetched), self._prompts.stop))


def is_informative(group: Sequence[Completion]) -> bool:
    """True if the completions of a prompt have unequal scores."""
    group_ids = np.zeros(len(group), np.int32)
    return bool(np.asarray(informative_groups(scores_of(group), group_ids))[0])
