"""REINFORCE++: no critic and no groups; rewards-to-go, whitened over the batch.

References:
  Hu et al., "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models",
  2025. https://arxiv.org/abs/2501.03262
"""

from dataclasses import dataclass

from jaxtyping import Array

from jrl.losses import reinforce_plus_plus_advantages
from jrl.recipes.base.batch import Batch, Targets, penalised_rewards
from jrl.recipes.base.recipe import Recipe


@dataclass(frozen=True)
class ReinforcePlusPlus(Recipe):
    """REINFORCE++: PPO's clip on advantages that are the whitened rewards-to-go."""

    prompts: int = 512
    group_size: int = 1

    gamma: float = 1.0
    """Discount per token."""
    kl_reward_coef: float | None = None
    """Weight of the KL penalty towards the starting policy in each token's reward (k1); None is
    off."""

    @property
    def uses_reference(self) -> bool:
        return self.kl_coef is not None or self.kl_reward_coef is not None

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        rewards = penalised_rewards(batch, self.kl_reward_coef)
        # Whitened over all tokens of the step: with groups of one there is no other baseline.
        advantages = reinforce_plus_plus_advantages(rewards, batch.mask, gamma=self.gamma)
        return Targets(advantages)
