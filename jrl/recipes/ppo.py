"""PPO on tokens: a critic, GAE, the clipped surrogate.

References:
  Schulman et al., "Proximal Policy Optimization Algorithms", 2017. https://arxiv.org/abs/1707.06347
  Schulman et al., "High-Dimensional Continuous Control Using GAE", 2015.
  https://arxiv.org/abs/1506.02438
"""

from dataclasses import dataclass, replace

from jaxtyping import Array, Int

from jrl.losses import gae, whiten
from jrl.recipes.base.actor_critic import ActorCritic
from jrl.recipes.base.batch import Batch, Targets, required
from jrl.recipes.base.token_rewards import penalised_rewards


@dataclass(frozen=True)
class Ppo(ActorCritic):
    """PPO as used for language models; the defaults fit a laptop."""

    prompts: int = 512
    group_size: int = 1

    lam: float = 0.95
    """Lambda of GAE, for advantages and returns."""
    value_clip: float | None = 0.5
    """Clip range of the value loss: how far a value may move from its old one before its gradient
    stops; None is off."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of a step to mean 0 and variance 1."""
    kl_reward_coef: float | None = None
    """Weight of the KL penalty towards the starting policy in each token's reward (k1); None is
    off."""

    @property
    def uses_reference(self) -> bool:
        return self.kl_coef is not None or self.kl_reward_coef is not None

    def policy_lambda(self, lengths: Int[Array, "batch"]) -> float:
        return self.lam

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        mask = batch.mask
        rewards = penalised_rewards(batch, self.kl_reward_coef)
        # One lambda for both; VAPO has two, see there.
        advantages, returns = gae(
            rewards, required(batch.old_values), mask, gamma=self.gamma, lam=self.lam
        )
        if self.whiten_advantages:
            # Returns stay as they are: the critic's targets are in units of reward.
            advantages = whiten(advantages, mask)
        return Targets(advantages, returns)


def paper() -> Ppo:
    """The vanilla PPO baseline of the VAPO paper: lam 0.95, clip 0.2, one loss per response."""
    return replace(
        Ppo(),
        prompts=8192,
        group_size=1,
        mini_batch=512,
        micro_batch=512,
        learning_rate=1e-6,
        critic_learning_rate=2e-6,
        lam=0.95,
        clip_low=0.2,
        clip_high=0.2,
        aggregation="seq-mean-token-mean",
        reward_correct=1.0,
        reward_wrong=-1.0,
    )
