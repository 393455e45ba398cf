"""Groups until enough of them have completions that do not all score alike."""

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jrl.losses import informative_groups
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.decoding.requests import Trajectory
from jrl.rollout.sampler import Completion, Sampler, Unverified, in_order, scores_of
from jrl.rollout.sampling import Sampling
from jrl.rollout.timing import timed
from jrl.tasks import Example


class Groups:
    """Prompts that were asked for, and what is known of their completions.

    Args:
      sampler: with the policy loaded.
      recipe: how many groups of which size.
      sampling: how tokens are drawn.
      seconds: where the time taken is added.
    """

    _compares = True  # whether verdicts say which groups are informative

    def __init__(
        self, sampler: Sampler, recipe: Recipe, sampling: Sampling, seconds: dict[str, float]
    ):
        self._sampler, self._recipe, self._sampling = sampler, recipe, sampling
        self._seconds = seconds
        self._drawn = Unverified(sampler.task, seconds)
        self._examples: dict[int, Example] = {}
        self._groups: defaultdict[int, list[Completion]] = defaultdict(list)
        self._informative: dict[int, bool] = {}

    def _begin(self, numbers: range) -> None:
        """Asks for the groups of prompts."""
        if numbers:
            fresh = {number: self._sampler.task.train(number) for number in numbers}
            self._examples |= fresh
            requests = self._sampler.requests(fresh, self._recipe.group_size)
            self._sampler.engine.submit(requests, self._sampling)

    def _polled(self) -> list[Trajectory]:
        """What has come to its end, its time counted."""
        # Verdicts are made in the background meanwhile.
        with timed("timing_s/gen", self._seconds):
            return self._sampler.engine.poll()

    def _learn(self, completions: list[Completion]) -> None:
        for completion in completions:
            self._groups[completion.trajectory.request.prompt].append(completion)
        for number in {completion.trajectory.request.prompt for completion in completions}:
            group = self._groups[number]
            # Whole groups alone: more completions may still make scores differ.
            if self._compares and len(group) == self._recipe.group_size:
                self._informative[number] = is_informative(group)


class DynamicSampler(Groups):
    """Asks for prompts one by one until enough of them are known to be informative.

    The prompts that count are the first ones, up to the last that is needed. Where slots would be
    idle, prompts beyond those are begun in advance, as many as the share of informative ones lets
    expect; what turns out to be too much is dropped, and drawn again in the next step.

    Args:
      sampler, recipe, sampling, seconds: as of `Groups`.
      first: number of the first prompt.
      most: prompts asked for at most.
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
        """All that a step needs, or all there is after the most prompts, the same whatever the
        order in which responses ended.

        Returns:
          The completions of all prompts that were needed, in their order, and ``[prompts]`` which
          of those groups have scores that differ.
        """
        while (needed := self._needed()) is None:
            self._ask()
            if trajectories := self._polled():
                self._sampler.judge(self._drawn, trajectories, self._examples)
                self._learn(self._drawn.ready())
            else:
                # Nothing is under way: what is missing are verdicts.
                self._learn(self._drawn.verified())
        self._sampler.engine.cancel([number for number in self._examples if number not in needed])
        examples = {number: self._examples[number] for number in needed}
        completions = [each for number in needed for each in self._groups[number]]
        informative = np.array([self._informative[number] for number in needed])
        return in_order(completions, examples), informative

    def _needed(self) -> range | None:
        """The prompts that count, once it is known which those are."""
        found = 0
        for number in range(self._first, self._first + self._most):
            # In the order of prompts: a later one that is known sooner must not take its place, or
            # what is learned from would depend on when verdicts came.
            if number not in self._informative:
                return None
            found += self._informative[number]
            if found == self._recipe.prompts:
                return range(self._first, number + 1)
        return range(self._first, self._first + self._most)

    def _ask(self) -> None:
        """For as many prompts as are surely needed, and into idle slots for those likely to be."""
        known, asked = len(self._informative), len(self._examples)
        found, undecided = sum(self._informative.values()), asked - known
        # Needed even if all that are undecided turn out to be informative.
        missing = self._recipe.prompts - found - undecided
        # One more on both sides, so that the share is never 0, nor undefined at the start.
        likely = (found + 1) / (known + 1)
        expected = math.ceil((self._recipe.prompts - found - undecided * likely) / likely)
        room = self._sampler.engine.num_idle // self._recipe.group_size
        more = max(missing, min(expected, room))
        end = self._first + min(asked + max(more, 0), self._most)
        self._begin(range(self._first + asked, end))


def is_informative(group: Sequence[Completion]) -> bool:
    """Whether the completions of a prompt have scores that differ."""
    one_group = np.zeros(len(group), np.int32)
    return bool(np.asarray(informative_groups(scores_of(group), one_group))[0])
