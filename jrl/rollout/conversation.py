"""State of a multi-turn conversation: its messages, rewards, and the author of each token."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jrl.tasks.task import FAILURES, Example, Verdict


@dataclass(frozen=True)
class Conversation:
    """Conversation in a response.

    Attributes:
      example: provides the prompt and the environment.
      messages: role and content of all messages after the prompt, the policy's as "assistant".
      answers: start and end of each answer of the environment, as positions in the response.
      rewards: rewards of each turn of the policy that was answered, with the position of its last
        token in the response.
      turn_limit: true if the limit of turns ended it.
      truncated_turns: indices of the policy's turns that the limit of a turn truncated.
      limit: length limit of the response in tokens, if the request has the limit of the current
        turn; None if they are equal.
      verdict: verdict of the whole conversation; None while it is in progress.
    """

    example: Example
    messages: tuple[tuple[str, str], ...] = ()
    answers: tuple[tuple[int, int], ...] = ()
    rewards: tuple[tuple[int, float], ...] = ()
    turn_limit: bool = False
    truncated_turns: tuple[int, ...] = ()
    limit: int | None = None
    verdict: Verdict | None = None

    @property
    def policy_messages(self) -> tuple[str, ...]:
        """The policy's messages."""
        return tuple(content for role, content in self.messages if role == "assistant")

    @property
    def begin(self) -> int:
        """Position of the first token of the current turn."""
        return self.answers[-1][1] if self.answers else 0

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the response that the environment wrote."""
        return sum(end - begin for begin, end in self.answers)

    @property
    def rewards_before_end(self) -> tuple[tuple[int, float], ...]:
        """Positions and rewards of turns after which the conversation continued; the reward of the
        turn that ended it is part of the score only."""
        if self.verdict is None or self.verdict.reason in FAILURES:
            return ()
        answered = {begin - 1 for begin, _ in self.answers}
        return tuple((position, x) for position, x in self.rewards if x and position in answered)

    def policy_mask(self, length: int) -> np.ndarray:
        """Mask of the response tokens that the policy sampled, ``[length]`` bool."""
        mask = np.ones(length, bool)
        for begin, end in self.answers:
            mask[begin:end] = False
        return mask

    @property
    def records(self) -> list[dict[str, Any]]:
        """Messages for samples.jsonl; truncated turns are marked."""
        records: list[dict[str, Any]] = [{"role": r, "content": x} for r, x in self.messages]
        policy_records = [message for message in records if message["role"] == "assistant"]
        for turn in self.truncated_turns:
            policy_records[turn]["truncated"] = True
        return records

    @property
    def text(self) -> str:
        """Readable text of the conversation, after the prompt."""
        lines = (
            content if role == "assistant" else f"[{role}] {content}"
            for role, content in self.messages
        )
        return "\n".join(lines)
