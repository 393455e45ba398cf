"""Interface of a task: prompts, reference completions, and verdicts on sampled completions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

# The verifier took too long, raised an exception, or gave NaN, an infinity or no number.
FAILURES = ("timeout", "error", "not_finite", "invalid")
# Reason of a score. "unevaluated" is an answer that has the right value and is not in final form,
# for example 17 + 25 for 42; "unparsable" is the absence of an answer.
REASONS = ("correct", "partial", "wrong", "unevaluated", "unparsable", *FAILURES)


@dataclass(frozen=True)
class Example:
    """A prompt with a completion that scores full marks.

    Attributes:
      prompt: text that the policy reads; of a conversation a readable form. Distinct among
        examples, except for those with different hidden fields.
      answer: a reference completion, for a supervised warm start; others may score as much.
      messages: role and content of each message of a conversation, from which a chat template makes
        the prompt; empty if the prompt is a text.
      record: every field of its source but the prompt, for rewards.
      task: the name of its task in a mixture of several, empty elsewhere.
      turns: role and content of the messages after the prompt in a reference conversation, of which
        the first and last are the policy's ("assistant"); empty if the answer is the whole of it.
      hidden: the part of the record that the prompt does not show, if an environment answers or a
        chat template reads more than contents; part of the example's identity.
      tools: JSON schemas of the tools that a chat template describes to the policy, as texts.
      instruction: required form of answers, for a chat model whose conversation has no system
        message; unused for a policy that has no chat template.
      opening: the messages with all their fields, for chat templates; empty is `messages`.
      template_arguments: variables of its chat template, for example enable_thinking.
      location: of its record, for error messages.
    """

    prompt: str
    answer: str
    messages: tuple[tuple[str, str], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    task: str = field(default="", compare=False, repr=False)
    turns: tuple[tuple[str, str], ...] = ()
    hidden: str = ""
    tools: tuple[str, ...] = ()
    instruction: str = field(default="", compare=False, repr=False)
    opening: tuple[Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)
    template_arguments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    location: str = field(default="", compare=False, repr=False)

    @property
    def identity(self) -> str:
        """Identity of the example, distinct among examples: the prompt, and the hidden fields."""
        return f"{self.prompt}\0{self.hidden}" if self.hidden else self.prompt


@dataclass(frozen=True)
class Verdict:
    """Score of a completion, and the reason for it.

    Attributes:
      score: score of a verifier in [0, 1], where 1 is full marks; the weighted sum of rewards is
        any finite number.
      reason: one of `REASONS`. Of a verifier, "correct" goes with 1, "partial" with scores between
        0 and 1, the others with 0.
      parts: name and value of each reward component in the sum; None for a verifier's verdict.
    """

    score: float
    reason: str
    parts: tuple[tuple[str, float], ...] | None = None

    def __post_init__(self):
        if self.parts is not None:
            if self.reason not in REASONS or not math.isfinite(self.score):
                raise ValueError(
                    f"score={self.score} and reason={self.reason!r} must be a finite number and "
                    f"one of {', '.join(REASONS)}"
                )
            return
        expected = 1.0 if self.reason == "correct" else 0.0
        fits = 0.0 < self.score < 1.0 if self.reason == "partial" else self.score == expected
        if self.reason not in REASONS or not fits:
            raise ValueError(
                f"score={self.score} does not go with reason={self.reason!r}: 1 goes with "
                f"'correct', 0 < score < 1 with 'partial', 0 with the others of "
                f"{', '.join(REASONS)}"
            )

    @property
    def correct(self) -> bool:
        """True if it has full marks; accuracy is the share of these."""
        return self.reason == "correct"


CORRECT = Verdict(1.0, "correct")
WRONG = Verdict(0.0, "wrong")
UNPARSABLE = Verdict(0.0, "unparsable")


@runtime_checkable
class Prompts(Protocol):
    """A source of prompts: a task without its verdicts.

    Lengths are in characters and hold for every prompt and every reference completion, without the
    end of the sequence. `characters` is sorted and contains all characters of these.
    Everything depends on the task's seed and the index alone, in every process.
    """

    @property
    def name(self) -> str:
        """Name by which the task was requested."""
        ...

    @property
    def max_prompt_length(self) -> int: ...

    @property
    def max_response_length(self) -> int: ...

    @property
    def characters(self) -> str: ...

    @property
    def heldout_size(self) -> int | None:
        """Number of held-out prompts; None is an endless supply."""
        ...

    def train(self, index: int) -> Example:
        """The index-th example of an endless training stream."""
        ...

    def heldout(self, index: int) -> Example:
        """The index-th held-out example; its prompt never occurs in training."""
        ...


@runtime_checkable
class Task(Prompts, Protocol):
    """A source of prompts that can score completions."""

    def verify(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Verdict]:
        """Scores one completion per example; no content of a completion raises an exception."""
        ...

    def close(self) -> None:
        """Ends the worker process, if there is one; it may be called repeatedly."""
        ...


def pair_completions(
    examples: Sequence[Example], completions: Sequence[str]
) -> list[tuple[Example, str]]:
    """Pairs of an example and its completion.

    Raises:
      ValueError: unless there is one completion per example.
    """
    if len(examples) != len(completions):
        raise ValueError(
            f"completions has {len(completions)} entries for {len(examples)} examples: "
            "give one completion per example, repeating the example for each sample of its group"
        )
    return list(zip(examples, completions, strict=True))


def check_index(index: int, size: int | None = None) -> None:
    """Raises ValueError unless ``0 <= index`` and, if there is a size, ``index < size``."""
    if index < 0 or (size is not None and index >= size):
        bound = "0 or more" if size is None else f"in [0, {size})"
        raise ValueError(f"index={index} is out of range: it must be {bound}")


class PromptSourceTask:
    """A task with the prompts of another task or of a list; subclasses define the scoring only."""

    def __init__(self, prompts: Prompts):
        self._prompts = prompts
        self.sources: tuple[Prompts, ...] = (prompts,)
        """Sources of the prompts."""

    @property
    def name(self) -> str:
        return self._prompts.name

    @property
    def max_prompt_length(self) -> int:
        return self._prompts.max_prompt_length

    @property
    def max_response_length(self) -> int:
        return self._prompts.max_response_length

    @property
    def characters(self) -> str:
        return self._prompts.characters

    @property
    def heldout_size(self) -> int | None:
        return self._prompts.heldout_size

    def train(self, index: int) -> Example:
        """The index-th training example."""
        return self._prompts.train(index)

    def heldout(self, index: int) -> Example:
        """The index-th held-out example."""
        return self._prompts.heldout(index)


class CompletionText(str):
    """Text of a completion, with a placeholder character for every special token.

    Attributes:
      special: the text with special tokens written out, without the end token.
    """

    special: str

    def __new__(cls, text: str, special: str):
        instance = super().__new__(cls, text)
        instance.special = special
        return instance


def special_of(text: str) -> str:
    """The text with special tokens written out; the text itself if it has no such form."""
    return text.special if isinstance(text, CompletionText) else text
