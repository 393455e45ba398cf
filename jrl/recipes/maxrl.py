"""MaxRL: advantages are rewards minus the mean reward of the prompt, divided by that mean.

References:
  Tajwar et al., "Maximum likelihood reinforcement learning", 2026.
  https://arxiv.org/abs/2602.02710
"""

from dataclasses import dataclass

from jaxtyping import Array, Float

from jrl.losses import maxrl_advantages
from jrl.recipes.base.batch import Batch, required
from jrl.recipes.base.group_relative import GroupRelative


@dataclass(frozen=True)
class Maxrl(GroupRelative):
    """MaxRL: a prompt that is seldom solved has a larger weight."""

    def __post_init__(self):
        super().__post_init__()
        if self.reward_wrong < 0 or self.reward_correct < 0:
            raise ValueError(
                f"reward_wrong={self.reward_wrong} and reward_correct={self.reward_correct}: MaxRL "
                "divides by the mean reward of a prompt, so rewards must not be negative."
            )

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        return maxrl_advantages(required(batch.rewards), required(batch.groups))
