"""What a step collects before it learns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OneRound:
    """`Recipe.prompts` prompts, each completed `Recipe.group_size` times."""


@dataclass(frozen=True)
class DynamicSampling:
    """Rounds of prompts until enough groups have completions that do not all score alike.

    Args:
      max_rounds: after so many, what is missing is filled up with groups that do not count.

    References:
      Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, section
      3.2. https://arxiv.org/abs/2503.14476
    """

    max_rounds: int


Collection = OneRound | DynamicSampling
