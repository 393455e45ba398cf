"""Tasks whose examples are generated at random, in endless supply."""

from collections.abc import Sequence
from dataclasses import dataclass

from jrl.tasks.data.records import example_of
from jrl.tasks.data.split import HELDOUT_SHARE, generator, is_heldout
from jrl.tasks.definition import Endless, score_of
from jrl.tasks.task import CORRECT, UNPARSABLE, WRONG, Example, Verdict, check_index, check_pairs


@dataclass(frozen=True)
class ProceduralTask:
    """An endless task: a definition generates records, and its reward scores completions in this
    process.

    Attributes:
      name: by which the task is requested.
      seed: picks the training stream and the held-out one; which prompts are held out is the same
        for all seeds.
      definition: generates prompts and rewards completions.
      heldout_size: held-out prompts; None is an endless supply, though small spaces repeat
        themselves.
      heldout_share: of the prompts, in (0, 1).
    """

    name: str
    seed: int
    definition: Endless
    heldout_size: int | None = None
    heldout_share: float = HELDOUT_SHARE

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
        check_pairs(examples, completions)
        return [
            score_of(self.definition, *pair) for pair in zip(examples, completions, strict=True)
        ]

    def close(self) -> None:
        """Does nothing: there is no worker process."""

    def _example(self, part: str, index: int) -> Example:
        check_index(index)
        random = generator(self.name, self.seed, part, index)
        while True:
            record = self.definition.prompts(random)
            if isinstance(record, Example):
                example = record
            else:
                example = example_of(record, f"task={self.name}")
            if is_heldout(example.identity, self.heldout_share) == (part == "heldout"):
                return example


def score_exact(completion: str, answer: str, alphabet: str) -> Verdict:
    """Scores a completion that must equal the answer, both written in the alphabet."""
    if completion == answer:
        return CORRECT
    if completion and set(completion) <= set(alphabet):
        return WRONG
    return UNPARSABLE
