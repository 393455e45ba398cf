"""RLOO: leave-one-out baseline, the mean reward of the other completions of the prompt.

References:
  Ahmadian et al., "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human
  Feedback in LLMs", 2024, section 4. https://arxiv.org/abs/2402.14740
"""

from dataclasses import dataclass

from jaxtyping import Array, Float

from jrl.losses import rloo_advantages
from jrl.recipes.base.batch import Batch, required
from jrl.recipes.base.group_relative import GroupRelative


@dataclass(frozen=True)
class Rloo(GroupRelative):
    """RLOO over tokens. In the first update of a step its gradient is that of REINFORCE; in later
    ones the clipped ratio corrects for completions that are off-policy."""

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        # A baseline without the completion's own reward keeps the gradient unbiased.
        return rloo_advantages(required(batch.rewards), required(batch.groups))
