"""Definition of a task: its prompts, and the reward of a completion.

A record is a mapping with "prompt", a text (or "messages", the turns of a conversation, in its
place), "answer" where there is a reference answer to imitate, and whatever else the reward reads.
Every field but the prompt is passed to the reward by its name. Tasks of the library and tasks of a
user's own are written in the same way.
"""

from collections.abc import Awaitable, Mapping, Sequence
from random import Random
from typing import Any, Protocol, runtime_checkable

from jrl.tasks.answers import extract
from jrl.tasks.task import UNPARSABLE, Example, Verdict

Record = Mapping[str, Any]
"""A prompt, its reference answer if any, and the other fields that its reward reads."""
Reward = float | Mapping[str, float] | Verdict
"""A score, the parts of a score by name, or a score with its reason."""


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
        """Draws a record, or the example of one; all its randomness comes from `random`."""
        ...

    @property
    def reward(self) -> Any:
        """As `Listed.reward`."""
        ...


@runtime_checkable
class Listed(Protocol):
    """A task with a list of prompts.

    It may also have `heldout`, records to evaluate on that are kept apart from `prompts`;
    `weights`, by the names of a reward's parts (1 by default); and `full_marks`, the weighted sum
    from which on a completion counts as correct (`jrl.tasks.rewards.rewarded`).
    """

    @property
    def prompts(self) -> Sequence[Record | str]:
        """Records, or prompts alone."""
        ...

    def reward(self, prompt: str, completion: str, **record: Any) -> Reward | Awaitable[Reward]:
        """Returns the reward of a completion.

        Args:
          prompt: as the policy read it; of a conversation, a readable text of its turns.
          completion: the text that the policy wrote.
          record: the other fields of its record; a reward that does not take them all, by
            ``**record``, is given those that it names.
        """
        ...


def score_of(definition: Endless, example: Example, completion: str) -> Verdict:
    """Verdict of a trusted definition: computed in this process, without a time limit."""
    fields = {"answer": example.answer, **example.record}
    answer = extract(completion, bare=True)
    if answer is None:
        return UNPARSABLE
    verdict = definition.reward(example.prompt, answer.text, **fields)
    assert isinstance(verdict, Verdict), f"{verdict!r} is not a Verdict"
    return verdict
