"""Dr. GRPO: GRPO without dividing by a group's standard deviation or by a response's length.

References:
  Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025.
  https://arxiv.org/abs/2503.20783
"""

from dataclasses import dataclass

from jaxtyping import Array, Float

from jrl.losses import Aggregation, dr_grpo_advantages
from jrl.recipes.base.batch import Batch, required
from jrl.recipes.base.group_relative import GroupRelative


@dataclass(frozen=True)
class DrGrpo(GroupRelative):
    """Dr. GRPO; token losses are divided by the length limit, which is the same in each step."""

    # Divided by its own length, a long wrong response would cost less for each token.
    aggregation: Aggregation = "seq-mean-token-sum-norm"

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        return dr_grpo_advantages(required(batch.rewards), required(batch.groups))
