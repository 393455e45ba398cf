"""List of prompts: its held-out split, its order in training, and verdicts by workers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from jrl.tasks.answers.numbers import read_statement, same_statement
from jrl.tasks.data.fields import short
from jrl.tasks.data.split import HeldOut, generator, is_heldout, position
from jrl.tasks.task import (
    UNPARSABLE,
    Example,
    PromptSourceTask,
    Verdict,
    check_index,
    pair_completions,
)
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Message, parse_failure


def drop_repeated(examples: Iterable[Example]) -> tuple[list[Example], int]:
    """Examples with distinct prompts, and the number of examples left out.

    The first example of each prompt is kept.

    Raises:
      ValueError: naming two examples with the same prompt and different answers. Numbers may be
        spelled differently, as 0.5 and 1/2.
    """
    unique: dict[str, Example] = {}
    repeated = 0
    for example in examples:
        before = unique.setdefault(example.identity, example)
        if before is example:
            continue
        repeated += 1
        if not _same_answer(before.answer.strip(), example.answer.strip()):
            file, _, line = before.location.rpartition(":")
            is_line = line.isdecimal() and example.location.startswith(f"{file}:")
            first = f"line {line}" if is_line else before.location
            raise ValueError(
                f"{example.location}: the prompt of {first} again, with another answer "
                f"({short(example.answer)} here, {short(before.answer)} there): keep one of the two"
            )
    return list(unique.values()), repeated


def _same_answer(first: str, second: str) -> bool:
    if first == second:
        return True
    statements = (read_statement(text, marked=True) for text in (first, second))
    return same_statement(*statements)


E = TypeVar("E", bound=Example)


class PromptList(Generic[E]):
    """A list of examples: some are held out, the others are trained on in repeated passes.

    Each pass over the training examples has an order of its own. By default one example in ten is
    held out, by the hash of its prompt, and at least one is on either side.

    Attributes:
      examples: all of them, in the order of the list.
      kind: what they are, in the plural.
      num_shared: examples of the list that are left out of training, because a held-out example
        has the same prompt.
      num_repeated: records that were left out, because an earlier one has the same prompt.
      unreadable: locations of the records that were left out, because their answer cannot be
        checked.
      prompt_fields: fields that prompts were read from, if no setting names them.
    """

    kind, _fix = "prompts", "raise --prompt-length"

    def __init__(
        self,
        name: str,
        examples: Sequence[E],
        seed: int,
        heldout: HeldOut | None = None,
        heldout_examples: Sequence[E] | None = None,
        stream: str | None = None,
        num_repeated: int = 0,
    ):
        """Splits the examples.

        Args:
          name: by which the task is requested.
          examples: with distinct prompts; at least two, or one if others are held out.
          seed: selects the order of the training examples.
          heldout: which of them are held out; None is one in ten.
          heldout_examples: held-out examples that are not in the list; None holds out some that
            are. Examples of the list with one of their prompts are left out.
          stream: identifies the random stream of the order, beside the seed, if the name contains
            the path of a file; None is the name.
          num_repeated: records that were left out.

        Raises:
          ValueError: if nothing is left to train on, unless everything is held out.
        """
        heldout = HeldOut() if heldout is None else heldout
        self._trains = heldout_examples is not None or not heldout.everything
        self._seed, self._stream = seed, name if stream is None else stream
        self._order: tuple[int, list[int]] = (-1, [])
        self.name: str = name
        self.num_repeated: int = num_repeated
        self.unreadable: tuple[str, ...] = ()
        self.prompt_fields: tuple[str, ...] = ()
        if heldout_examples is None:
            identities = _select_heldout(name, examples, heldout)
            self._heldout = [example for example in examples if example.identity in identities]
        else:
            identities = {example.identity for example in heldout_examples}
            self._heldout = list(heldout_examples)
        self._train = [example for example in examples if example.identity not in identities]
        self.num_shared: int = 0 if heldout_examples is None else len(examples) - len(self._train)
        if (self._trains and not self._train) or not self._heldout:
            raise ValueError(
                f"task={name}: {len(self._train)} prompts to train on and {len(self._heldout)} "
                "held out; at least 1 of each is needed: choose another --held-out"
            )
        self._measure(examples if heldout_examples is None else [*self._train, *self._heldout])

    def _measure(self, examples: Sequence[E]) -> None:
        self.examples: Sequence[E] = tuple(examples)
        self.heldout_size: int | None = len(self._heldout)
        self.max_prompt_length: int = max(len(example.prompt) for example in examples)
        self.max_response_length: int = max(len(example.answer) for example in examples)
        texts = (example.prompt + example.answer for example in examples)
        self.characters: str = "".join(sorted(set().union(*texts)))

    @property
    def sides(self) -> tuple[Sequence[E], Sequence[E]]:
        """The examples that are trained on, and those that are held out."""
        return self._train, self._heldout

    def content_of(self, example: E) -> list[Any]:
        """All of an example that a run depends on, as values that are mostly JSON's."""
        record = dict(example.record)
        return [example.identity, example.opening, example.answer, example.turns, record]

    @property
    def train_prompts(self) -> set[str]:
        """Identities of the training examples."""
        return {example.identity for example in self._train}

    @property
    def heldout_prompts(self) -> set[str]:
        """Identities of the held-out examples."""
        return {example.identity for example in self._heldout}

    def train(self, index: int) -> E:
        """The index-th training example, a function of seed, index and the list alone."""
        check_index(index)
        if not self._trains:
            raise ValueError(
                f"task={self.name} has nothing to train on, as all its prompts are held out: "
                "choose another --held-out"
            )
        pass_index, offset = divmod(index, len(self._train))
        if self._order[0] != pass_index:
            order = list(range(len(self._train)))
            generator(self._stream, self._seed, "pass", pass_index).shuffle(order)
            self._order = (pass_index, order)
        return self._train[self._order[1][offset]]

    def heldout(self, index: int) -> E:
        """The index-th held-out example, in the order of the list."""
        check_index(index, self.heldout_size)
        return self._heldout[index]

    def leave_out(self, fits: Callable[[E], bool], why: str = "are too long") -> int:
        """Leaves out the prompts that do not fit, on both sides, before the first is used.

        Args:
          fits: whether a prompt fits.
          why: what the others do or are, for the error message.

        Returns:
          Their number.

        Raises:
          ValueError: if none is left on one side.
        """
        before = len(self.examples)
        fitting = [example for example in self.examples if fits(example)]
        fitting_ids = {id(example) for example in fitting}
        train, heldout = (
            [example for example in side if id(example) in fitting_ids]
            for side in (self._train, self._heldout)
        )
        if (self._trains and not train) or not heldout:
            raise ValueError(
                f"task={self.name}: of {before} {self.kind} {before - len(fitting)} {why}, "
                f"which leaves {len(train)} to train on and {len(heldout)} held out: {self._fix}"
            )
        self._train, self._heldout, self._order = train, heldout, (-1, [])
        self._measure(fitting)
        return before - len(fitting)


def _select_heldout(name: str, examples: Sequence[Example], heldout: HeldOut) -> set[str]:
    """The prompts that are held out of a list."""
    if heldout.everything:
        return {example.identity for example in examples}
    ranked = sorted(examples, key=lambda example: position(example.identity))
    if heldout.count is not None:
        if heldout.count >= len(ranked):
            raise ValueError(
                f"held_out={heldout.count} leaves nothing to train on: task={name} has "
                f"{len(ranked)} prompts"
            )
        num_heldout = heldout.count
    else:
        num_heldout = sum(is_heldout(example.identity, heldout.share) for example in ranked)
        num_heldout = min(max(num_heldout, 1), len(ranked) - 1)
    return {example.identity for example in ranked[:num_heldout]}


class FiniteTask(PromptSourceTask):
    """A list of prompts, with a pool of workers that score completions.

    Args:
      pool: answers ``{"score": ..., "reason": ...}``, or ``{"error": ...}``.
      question: makes the request to the pool from an example and a completion.
    """

    def __init__(
        self, prompts: PromptList, pool: Pool, question: Callable[[Example, str], Message]
    ):
        super().__init__(prompts)
        self._pool, self._question = pool, question

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example; equal pairs are sent once."""
        pairs = pair_completions(examples, completions)
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
    reply = parse_failure(answer)
    return Verdict(reply.get("score", 0.0), reply.get("failure") or reply["reason"])
