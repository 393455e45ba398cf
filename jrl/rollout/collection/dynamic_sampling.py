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
      seconds: dictionary to which the time taken is added.
    """

    _compares = True  # true if verdicts decide which groups are informative

    def __init__(
        self, sampler: Sampler, recipe: Recipe, sampling: Sampling, seconds: dict[str, float]
    ):
        self._sampler, self._recipe, self._sampling = sampler, recipe, sampling
        self._seconds = seconds
        self._unverified = Unverified(sampler.task, seconds)
        self._examples: dict[int, Example] = {}
        self._groups: defaultdict[int, list[Completion]] = defaultdict(list)
        self._informative: dict[int, bool] = {}

    def _submit_groups(self, prompts: range) -> None:
        """Submits the groups of prompts to the engine."""
        if prompts:
            fresh = {prompt: self._sampler.task.train(prompt) for prompt in prompts}
            self._examples |= fresh
            requests = self._sampler.requests(fresh, self._recipe.group_size)
            self._sampler.engine.submit(requests, self._sampling)

    def _poll_engine(self) -> list[Trajectory]:
        """Polls the engine for finished trajectories, and adds the time taken."""
        # Verification runs in the background meanwhile.
        with timed("timing_s/gen", self._seconds):
            return self._sampler.engine.poll()

    def _add_verified(self, completions: list[Completion]) -> None:
        for completion in completions:
            self._groups[completion.trajectory.request.prompt].append(completion)
        for prompt in {completion.trajectory.request.prompt for completion in completions}:
            group = self._groups[prompt]
            # Complete groups only: a further completion may still have another score.
            if self._compares and len(group) == self._recipe.group_size:
                self._informative[prompt] = is_informative(group)


class DynamicSampler(Groups):
    """Requests prompts in order until enough of their groups are informative.

    The batch is made of the first prompts, up to the last that is needed. Idle slots prefetch
    prompts beyond those, as many as the fraction of informative groups so far suggests; surplus
    groups are dropped, and sampled again in the next step.

    Args:
      sampler, recipe, sampling, seconds: as of `Groups`.
      first: id of the first prompt.
      most: maximum number of prompts.
    """

    def __init__(
        self,
        sampler: Sampler,
        recipe: Recipe,
        sampling: Sampling,
        *,
        first: int,
        most: int,
        seconds: dict[str, float],
    ):
        super().__init__(sampler, recipe, sampling, seconds)
        self._first, self._most = first, most

    def find(self) -> tuple[list[Completion], np.ndarray]:
        """Samples until a step has enough informative groups, or the maximum number of prompts is
        reached. The result does not depend on the order in which responses finish.

        Returns:
          The completions of all needed prompts, in their order, and ``[prompts]`` true for groups
          with unequal scores.
        """
        while (needed := self._needed()) is None:
            self._submit_prompts()
            if trajectories := self._poll_engine():
                self._sampler.judge(self._unverified, trajectories, self._examples)
                self._add_verified(self._unverified.poll())
            else:
                # Nothing is in flight: only verdicts are missing.
                self._add_verified(self._unverified.wait())
        self._sampler.engine.cancel([prompt for prompt in self._examples if prompt not in needed])
        examples = {prompt: self._examples[prompt] for prompt in needed}
        completions = [each for prompt in needed for each in self._groups[prompt]]
        informative = np.array([self._informative[prompt] for prompt in needed])
        return sort_completions(completions, examples), informative

    def _needed(self) -> range | None:
        """Prompt ids of the batch; None until they are determined."""
        num_informative = 0
        for prompt in range(self._first, self._first + self._most):
            # In the order of prompts: a later one that is verified sooner must not replace it, or
            # the batch would depend on the timing of verdicts.
            if prompt not in self._informative:
                return None
            num_informative += self._informative[prompt]
            if num_informative == self._recipe.prompts:
                return range(self._first, prompt + 1)
        return range(self._first, self._first + self._most)

    def _submit_prompts(self) -> None:
        """Submits all prompts that are certainly needed, and into idle slots those likely to be."""
        num_verified, num_submitted = len(self._informative), len(self._examples)
        num_informative = sum(self._informative.values())
        num_unverified = num_submitted - num_verified
        # Needed even if all undecided groups turn out to be informative.
        missing = self._recipe.prompts - num_informative - num_unverified
        # Plus one in numerator and denominator: the fraction is never 0, and defined at the start.
        likely = (num_informative + 1) / (num_verified + 1)
        expected = math.ceil(
            (self._recipe.prompts - num_informative - num_unverified * likely) / likely
        )
        idle_groups = self._sampler.engine.num_idle // self._recipe.group_size
        more = max(missing, min(expected, idle_groups))
        end = self._first + min(num_submitted + max(more, 0), self._most)
        self._submit_groups(range(self._first + num_submitted, end))


def is_informative(group: Sequence[Completion]) -> bool:
    """True if the completions of a prompt have unequal scores."""
    group_ids = np.zeros(len(group), np.int32)
    return bool(np.asarray(informative_groups(scores_of(group), group_ids))[0])
