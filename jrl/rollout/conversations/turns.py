"""How far a conversation is: who has said what, and which tokens of the response are whose."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jrl.tasks.task import FAILURES, Example, Verdict


@dataclass(frozen=True)
class Turns:
    """The conversation in a response.

    Attributes:
      example: whose environment answers.
      messages: role and content of all that was said after the prompt, the policy's as "assistant".
      answers: first token and end of each answer of the environment, as places in the response.
      rewards: of each turn of the policy that was answered, with the place of its last token in the
        response.
      turn_limit: whether the limit of turns ended it.
      cut: numbers of the policy's turns that the limit of a turn cut.
      limit: of the response in tokens, where the request has that of the turn that is written now;
        None where they are the same.
      verdict: of all of it; None while it goes on.
    """

    example: Example
    messages: tuple[tuple[str, str], ...] = ()
    answers: tuple[tuple[int, int], ...] = ()
    rewards: tuple[tuple[int, float], ...] = ()
    turn_limit: bool = False
    cut: tuple[int, ...] = ()
    limit: int | None = None
    verdict: Verdict | None = None

    @property
    def said(self) -> tuple[str, ...]:
        """The policy's messages."""
        return tuple(content for role, content in self.messages if role == "assistant")

    @property
    def begin(self) -> int:
        """The place of the first token of the turn that is written now."""
        return self.answers[-1][1] if self.answers else 0

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the response that the environment wrote."""
        return sum(end - begin for begin, end in self.answers)

    @property
    def rewards_before_end(self) -> tuple[tuple[int, float], ...]:
        """Those of turns after which the conversation went on: the reward of the turn that ended it
        is a part of the score alone."""
        if self.verdict is None or self.verdict.reason in FAILURES:
            return ()
        answered = {begin - 1 for begin, _ in self.answers}
        return tuple((place, x) for place, x in self.rewards if x and place in answered)

    def of_policy(self, length: int) -> np.ndarray:
        """``[length]`` bool; which tokens of the response the policy wrote."""
        own = np.ones(length, bool)
        for begin, end in self.answers:
            own[begin:end] = False
        return own

    @property
    def records(self) -> list[dict[str, Any]]:
        """The messages as samples.jsonl holds them; a turn that was cut says so."""
        found: list[dict[str, Any]] = [{"role": r, "content": x} for r, x in self.messages]
        own = [message for message in found if message["role"] == "assistant"]
        for number in self.cut:
            own[number]["truncated"] = True
        return found

    @property
    def text(self) -> str:
        """The conversation for people, after the prompt."""
        lines = (
            content if role == "assistant" else f"[{role}] {content}"
            for role, content in self.messages
        )
        return "\n".join(lines)
