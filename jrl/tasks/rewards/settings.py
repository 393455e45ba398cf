"""Settings of rewards: reward functions, their weights, and the score of a failure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TASK_REWARD = "task"
"""Stands for the task's own verifier or reward among others, and is its name among the parts."""


@dataclass(frozen=True)
class RewardSettings:
    """Settings of the rewards of completions.

    Attributes:
      rewards: references to functions, and `TASK_REWARD`; empty is the task's own alone.
      weights: ``NAME=NUMBER`` each; the weight of others is 1.
      seconds: time limit of one call.
      failed: the score of a completion whose reward failed.
    """

    rewards: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    seconds: float = 5.0
    failed: float = 0.0

    def __post_init__(self):
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"reward_seconds={self.seconds} must be above 0.")
        if not math.isfinite(self.failed):
            raise ValueError(f"failed_reward={self.failed} must be a finite number.")
        twice = {name for name in self.rewards if self.rewards.count(name) > 1}
        if twice:
            raise ValueError(f"reward={', '.join(sorted(twice))} is given twice: once is enough.")
        parse_weights(self.weights)


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Weights by name, of ``NAME=NUMBER`` each.

    Raises:
      ValueError: for what is written otherwise, and a name that comes twice.
    """
    weights: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not equals or not math.isfinite(weight):
            raise ValueError(
                f"reward_weights={text!r} is not a weight: write NAME=NUMBER, as in format=0.2."
            )
        if name in weights:
            raise ValueError(f"reward_weights has {name!r} twice: give each name one weight.")
        weights[name] = weight
    return weights
