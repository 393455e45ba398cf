"""What a step collects before it learns, or is given."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OneRound:
    """`Recipe.prompts` prompts, each completed `Recipe.group_size` times."""


@dataclass(frozen=True)
class DynamicSampling:
    """Prompts until enough groups have completions that do not all score alike.

    Args:
      max_rounds: after so many times the prompts of a step, what is missing is filled up with
        groups that do not count.

    References:
      Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, section
      3.2. https://arxiv.org/abs/2503.14476
    """

    max_rounds: int


@dataclass(frozen=True)
class Windows:
    """`Recipe.completions` responses, each written on for a window: those that the step before left
    unfinished, and then fresh prompts, each `Recipe.group_size` times.

    A response is finished when a stop token or the length limit ends it; its group may finish in
    other steps.

    Args:
      window: tokens that are sampled of a response in a step, at most; None where a recipe has yet
        to be fitted to the limit of responses.

    References:
      Fan et al., "Truncated proximal policy optimization", 2025. https://arxiv.org/abs/2506.15050
    """

    window: int | None


Collection = OneRound | DynamicSampling | Windows


@dataclass(frozen=True)
class Supervision:
    """What is learned where nothing is collected, as the conversations are given.

    Attributes:
      max_length: tokens of a conversation at most; None is what the policy's positions allow.
      truncates: whether longer ones are cut off at their end, and not left out.
      last_turn: whether the last turn of the assistant is learned, and not all of them.
    """

    max_length: int | None = None
    truncates: bool = False
    last_turn: bool = False
