"""Data collection of a step: one round, dynamic sampling, windows, or given conversations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OneRound:
    """Collection of `Recipe.prompts` prompts, each completed `Recipe.group_size` times."""


@dataclass(frozen=True)
class DynamicSampling:
    """Dynamic sampling: prompts until enough groups have completions with unequal scores.

    Args:
      max_rounds: after this multiple of the prompts of a step, the batch is padded with groups
        outside of the loss mask.

    References:
      Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, section
      3.2. https://arxiv.org/abs/2503.14476
    """

    max_rounds: int


@dataclass(frozen=True)
class Windows:
    """Partial rollouts: `Recipe.completions` responses, each continued for a window. They are those
    that the step before left unfinished, then fresh prompts, each `Recipe.group_size` times.

    A response is finished when a stop token or the length limit ends it; the others of its group
    may finish in other steps.

    Args:
      window: maximum number of tokens sampled per response in a step; None until the recipe is
        fitted to the limit of responses.

    References:
      Fan et al., "Truncated proximal policy optimization", 2025. https://arxiv.org/abs/2506.15050
    """

    window: int | None


Collection = OneRound | DynamicSampling | Windows


@dataclass(frozen=True)
class Supervision:
    """Supervised training data: given conversations, in place of collected completions.

    Attributes:
      max_length: maximum number of tokens of a conversation; None is the policy's maximum number
        of positions.
      truncates: true if longer ones are truncated at their end, false if they are left out.
      last_turn: true if only the last turn of the assistant is trained on, false for all turns.
    """

    max_length: int | None = None
    truncates: bool = False
    last_turn: bool = False
