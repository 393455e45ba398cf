"""What a step collects before it learns."""

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
