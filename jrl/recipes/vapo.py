"""VAPO: pretrained critic, decoupled and length-adaptive GAE, imitation of correct completions.

References:
  Yue et al., "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks",
  2025. https://arxiv.org/abs/2504.05118
  Yuan et al., "What's Behind PPO's Collapse in Long-CoT? (VC-PPO)", 2025.
  https://arxiv.org/abs/2503.01491
"""

from dataclasses import dataclass, replace

from jaxtyping import Array, Float, Int

from jrl.losses import Aggregation, gae, length_adaptive_lambda, whiten
from jrl.recipes.base.batch import Batch, Targets, per_turn_rewards, required
from jrl.recipes.ppo import ImitatingActorCritic
from jrl.setting import setting


@dataclass(frozen=True)
class Vapo(ImitatingActorCritic):
    """VAPO; the seven components of the paper, sizes that fit a laptop."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    aggregation: Aggregation = "token-mean"
    reward_correct: float = 1.0
    reward_wrong: float = -1.0

    pretrain_critic: int = 20
    """Steps at the start that train only the critic, on returns of the frozen policy."""
    lam_critic: float = setting(1.0, minimum=0, maximum=1)
    """Lambda of the critic's GAE targets; 1 makes them Monte-Carlo returns."""
    lam_alpha: float | None = 1.5
    """The policy's lam is 1 - 1 / (lam_alpha x response length). The paper's 0.05 suits lengths in
    the thousands: below 20 tokens it means lam = 0. None is `lam`, whatever the length."""
    lam: float = setting(0.95, minimum=0, maximum=1)
    """The policy's lam if it does not adapt to the length."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a step to mean 0 and variance 1. The paper does not say."""

    @property
    def length_adaptive_alpha(self) -> float | None:
        return self.lam_alpha

    def policy_lambda(self, lengths: Int[Array, "batch"]) -> float | Float[Array, "batch 1"]:
        if self.lam_alpha is None:
            return self.lam
        # So that the weight of the end on the first token is the same at every length.
        return length_adaptive_lambda(lengths, alpha=self.lam_alpha)[:, None]

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        mask, values = batch.mask, required(batch.old_values)
        rewards = per_turn_rewards(batch)
        # Sampled tokens only: an environment's answer in between is no action.
        lam = self.policy_lambda(required(batch.lengths))
        # Decoupled GAE (VC-PPO): the policy trades bias for variance, the critic must not.
        advantages, _ = gae(rewards, values, mask, gamma=self.gamma, lam=lam)
        _, returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam_critic)
        if self.whiten_advantages:
            # Advantages only: returns are the critic's targets, in units of reward.
            advantages = whiten(advantages, mask)
        return Targets(advantages, returns)

    @classmethod
    def paper(cls) -> "Vapo":
        """The paper's table: 512 prompts x 16, mini-batches of 512, 50 value pretraining steps."""
        return replace(
            cls(),
            prompts=512,
            group_size=16,
            mini_batch=512,
            micro_batch=512,
            learning_rate=1e-6,
            critic_learning_rate=2e-6,
            pretrain_critic=50,
            lam_critic=1.0,
            lam_alpha=0.05,
            positive_coef=0.1,
        )
