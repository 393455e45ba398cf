"""Tasks whose examples are drawn at random, as many as one likes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from jrl.tasks.split import generator, is_heldout
from jrl.tasks.task import CORRECT, UNPARSABLE, WRONG, Example, Verdict, check_index, check_pairs


@dataclass(frozen=True)
class ProceduralTask:
    """An endless task made of two functions: one draws an example, one scores a completion.

    Attributes:
      name: how the task is asked for.
      seed: picks the training stream and the held-out one; which prompts are held out is the same
        for all seeds.
      max_prompt_length: characters of the longest prompt that `draw` can return.
      max_response_length: characters of the longest answer that `draw` can return.
      characters: every character that `draw` can use, sorted.
      draw: makes an example from a random generator.
      score: judges one completion of an example, whatever it holds.
    """

    name: str
    seed: int
    max_prompt_length: int
    max_response_length: int
    characters: str
    draw: Callable[[Random], Example]
    score: Callable[[Example, str], Verdict]

    @property
    def heldout_size(self) -> int | None:
        """None: held-out prompts do not run out, though small spaces repeat themselves."""
        return None

    def train(self, index: int) -> Example:
        """The index-th training example, a function of seed and index alone."""
        return self._example("train", index)

    def heldout(self, index: int) -> Example:
        """The index-th held-out example, a function of seed and index alone."""
        return self._example("heldout", index)

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example."""
        check_pairs(examples, completions)
        return [self.score(*pair) for pair in zip(examples, completions, strict=True)]

    def close(self) -> None:
        """Does nothing: there is no worker process."""

    def _example(self, part: str, index: int) -> Example:
        check_index(index)
        random = generator(self.name, self.seed, part, index)
        while True:
            example = self.draw(random)
            if is_heldout(example.prompt) == (part == "heldout"):
                return example


def exact_digits(example: Example, completion: str) -> Verdict:
    """Scores a completion that must equal the answer; without being digits, it is unparsable."""
    return exact(completion, example.answer, "0123456789")


def exact(completion: str, answer: str, alphabet: str) -> Verdict:
    """Scores a completion that must equal the answer, both written in the alphabet."""
    if completion == answer:
        return CORRECT
    if completion and set(completion) <= set(alphabet):
        return WRONG
    return UNPARSABLE
