"""Tasks that are a list of examples, scored by worker processes."""

from collections.abc import Callable, Sequence

from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.data.split import HeldOut
from jrl.tasks.task import ERROR, TIMEOUT, UNPARSABLE, Example, Verdict, check_pairs
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Message


class FiniteTask(PromptList):
    """A list of examples, with a pool of workers that judge completions."""

    def __init__(
        self,
        name: str,
        examples: Sequence[Example],
        seed: int,
        pool: Pool,
        question: Callable[[Example, str], Message],
        heldout: HeldOut | None = None,
        heldout_examples: Sequence[Example] | None = None,
    ):
        """Splits the examples.

        Args:
          pool: answers ``{"score": ..., "reason": ...}``, or ``{"error": ...}``.
          question: what to ask it about an example and a completion.
          name, examples, seed, heldout, heldout_examples: as of `PromptList`.
        """
        super().__init__(name, examples, seed, heldout, heldout_examples)
        self._pool = pool
        self._question = question

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example; equal pairs are asked about once."""
        check_pairs(examples, completions)
        pairs = list(zip(examples, completions, strict=True))
        distinct_pairs = [pair for pair in dict.fromkeys(pairs) if pair[1].strip()]
        answers = self._pool.ask_all([self._question(*pair) for pair in distinct_pairs])
        verdicts = {
            pair: _verdict(answer) for pair, answer in zip(distinct_pairs, answers, strict=True)
        }
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
