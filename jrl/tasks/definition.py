"""Definition of a task: its prompts and the reward of a completion; and procedural tasks.

A record is a mapping with "prompt", a text (or "messages", the turns of a conversation, in its
place), "answer" if there is a reference answer to imitate, and whatever else the reward reads.
Every field but the prompt is passed to the reward by its name. Built-in and custom tasks are
written in the same way.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, runtime_checkable

from jrl.tasks.answers import extract
from jrl.tasks.data.records import example_of
from jrl.tasks.data.split import HELDOUT_SHARE, generator, is_heldout
from jrl.tasks.task import UNPARSABLE, Example, Verdict, check_index, pair_completions

Record = Mapping[str, Any]
"""A prompt, its reference answer if any, and the other fields that its reward reads."""
Reward = float | Mapping[str, float] | Verdict
"""A score, components of a score by name, or a score with its reason."""


@runtime_checkable
class Endless(Protocol):
    """A task whose prompts are generated at random, in endless supply.

    Lengths are in characters and hold for every prompt and every answer that can be generated;
    `characters` has all that they can contain, sorted.
    """

    @property
    def max_prompt_length(self) -> int: ...

    @property
    def max_response_length(self) -> int: ...

    @property
    def characters(self) -> str: ...

    def prompts(self, random: Random) -> Record | Example:
        """Draws a record, or an example; all its randomness comes from `random`."""
        ...

    @property
    def reward(self) -> Any:
        """As `Listed.reward`."""
        ...


@runtime_checkable
class Listed(Protocol):
    """A task with a list of prompts.

    It may also have `heldout`, records to evaluate on that are kept apart from `prompts`;
    `weights`, by the names of the reward's components (1 by default); and `full_marks`, the minimum
    weighted sum of a correct completion (`jrl.tasks.rewards`).
    """

    @property
    def prompts(self) -> Sequence[Record | str]:
        """Records, or prompts only."""
        ...

    def reward(self, prompt: str, completion: str, **record: Any) -> Reward | Awaitable[Reward]:
        """Returns the reward of a completion.

        Args:
          prompt: as the policy read it; for a conversation, a readable text of its turns.
          completion: the text that the policy wrote.
          record: the other fields of its record; a reward without ``**record`` is passed only the
            fields that it names.
        """
        ...


@dataclass(frozen=True)
class ProceduralTask:
    """An endless task: a definition generates records, and its reward scores completions in this
    process.

    Attributes:
      name: by which the task is requested.
      seed: selects the training stream and the held-out stream; which prompts are held out is the
        same for all seeds.
      definition: generates prompts and rewards completions.
      heldout_size: number of held-out prompts; None is an endless supply, in which prompts of a
        small space repeat.
      heldout_share: of the prompts, in (0, 1).
      stream: identifies the random streams, beside the seed, if the name contains the path of a
        file; None is the name.
    """

    name: str
    seed: int
    definition: Endless
    heldout_size: int | None = None
    heldout_share: float = HELDOUT_SHARE
    stream: str | None = None

    @property
    def max_prompt_length(self) -> int:
        return self.definition.max_prompt_length

    @property
    def max_response_length(self) -> int:
        return self.definition.max_response_length

    @property
    def characters(self) -> str:
        return self.definition.characters

    def train(self, index: int) -> Example:
        """The index-th training example, a function of seed and index alone."""
        return self._example("train", index)

    def heldout(self, index: int) -> Example:
        """The index-th held-out example, a function of seed and index alone."""
        check_index(index, self.heldout_size)
        return self._example("heldout", index)

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example."""
        return [self._score(*pair) for pair in pair_completions(examples, completions)]

    def close(self) -> None:
        """Does nothing: there is no worker process."""

    def _score(self, example: Example, completion: str) -> Verdict:
        """The verdict of the definition, which runs in this process with no time limit."""
        answer = extract(completion, bare=True)
        if answer is None:
            return UNPARSABLE
        fields = {"answer": example.answer, **example.record}
        verdict = self.definition.reward(example.prompt, answer.text, **fields)
        assert isinstance(verdict, Verdict), f"{verdict!r} is not a Verdict"
        return verdict

    def _example(self, part: str, index: int) -> Example:
        check_index(index)
        stream = self.name if self.stream is None else self.stream
        random = generator(stream, self.seed, part, index)
        while True:
            example = self.definition.prompts(random)
            if not isinstance(example, Example):
                example = example_of(example, f"task={self.name}")
            if is_heldout(example.identity, self.heldout_share) == (part == "heldout"):
                return example
