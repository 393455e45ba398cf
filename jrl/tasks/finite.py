"""Tasks that are a list of examples, scored by worker processes."""

from collections.abc import Callable, Sequence

from jrl.tasks.split import generator, is_heldout, position
from jrl.tasks.task import ERROR, TIMEOUT, UNPARSABLE, Example, Verdict, check_index, check_pairs
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Message


class FiniteTask:
    """A list of examples: some are held out, the others are gone through again and again.

    Each pass over the training examples has an order of its own. One example in ten is held out, by
    the hash of its prompt, and at least one is on either side.

    Attributes:
      examples: all of them, in the order of the list.
    """

    def __init__(
        self,
        name: str,
        examples: Sequence[Example],
        seed: int,
        pool: Pool,
        question: Callable[[Example, str], Message],
    ):
        """Splits the examples.

        Args:
          name: how the task is asked for.
          examples: at least two, with distinct prompts.
          seed: picks the order of the training examples.
          pool: answers ``{"score": ..., "reason": ...}``, or ``{"error": ...}``.
          question: what to ask it about an example and a completion.
        """
        ranked = sorted(examples, key=lambda example: position(example.prompt))
        num_heldout = sum(is_heldout(example.prompt) for example in ranked)
        num_heldout = min(max(num_heldout, 1), len(ranked) - 1)
        first = {example.prompt for example in ranked[:num_heldout]}
        self._train = [example for example in examples if example.prompt not in first]
        self._heldout = [example for example in examples if example.prompt in first]
        self._seed = seed
        self._pool = pool
        self._question = question
        self._order: tuple[int, list[int]] = (-1, [])
        self.name: str = name
        self.examples: Sequence[Example] = tuple(examples)
        self.heldout_size: int | None = num_heldout
        self.max_prompt_length: int = max(len(example.prompt) for example in examples)
        self.max_response_length: int = max(len(example.answer) for example in examples)
        self.characters: str = "".join(
            sorted(set().union(*(example.prompt + example.answer for example in examples)))
        )

    def train(self, index: int) -> Example:
        """The index-th training example, a function of seed, index and the list alone."""
        check_index(index)
        number, offset = divmod(index, len(self._train))
        if self._order[0] != number:
            order = list(range(len(self._train)))
            generator(self.name, self._seed, "pass", number).shuffle(order)
            self._order = (number, order)
        return self._train[self._order[1][offset]]

    def heldout(self, index: int) -> Example:
        """The index-th held-out example, in the order of the list."""
        check_index(index, self.heldout_size)
        return self._heldout[index]

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example; equal pairs are asked about once."""
        check_pairs(examples, completions)
        pairs = list(zip(examples, completions, strict=True))
        asked = [pair for pair in dict.fromkeys(pairs) if pair[1].strip()]
        answers = self._pool.ask_all([self._question(*pair) for pair in asked])
        verdicts = {pair: _verdict(answer) for pair, answer in zip(asked, answers, strict=True)}
        return [verdicts.get(pair, UNPARSABLE) for pair in pairs]

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()


def _verdict(answer: Message | Exception) -> Verdict:
    if isinstance(answer, TimeoutError):
        return TIMEOUT
    if isinstance(answer, Exception) or "error" in answer:
        return ERROR
    return Verdict(answer["score"], answer["reason"])
