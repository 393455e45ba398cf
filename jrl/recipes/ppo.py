"""PPO on tokens: a critic, GAE, the clipped surrogate; and what recipes with a critic share.

References:
  Schulman et al., "Proximal Policy Optimization Algorithms", 2017. https://arxiv.org/abs/1707.06347
  Schulman et al., "High-Dimensional Continuous Control Using GAE", 2015.
  https://arxiv.org/abs/1506.02438
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Array, Float, Int

from jrl.losses import ExplainedVariance, Mean, gae, positive_example_loss, value_loss, whiten
from jrl.losses.settings import Sides
from jrl.recipes.base.batch import Batch, Targets, Totals, penalised_rewards, required
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.recipe import Metrics, Recipe
from jrl.setting import setting


@dataclass(frozen=True)
class ActorCritic(Recipe):
    """Hyperparameters shared by the recipes that train a value network."""

    critic_learning_rate: float = setting(1e-3, minimum=0)
    """Learning rate of the critic."""
    value_clip: float | None = setting(None, minimum=0)
    """Clip range of the value loss: how far a value may move from its old one before its gradient
    stops; None is off."""
    gamma: float = setting(1.0, minimum=0, maximum=1)
    """Discount per token."""
    pretrain_critic: int = setting(0, minimum=0)
    """Steps at the start that train only the critic, on returns of the frozen policy."""

    uses_critic: ClassVar[bool] = True

    @property
    def value_pretraining_steps(self) -> int:
        return self.pretrain_critic

    @property
    def critic_optimizer(self) -> Optimizer:
        return replace(self.policy_optimizer, learning_rate=self.critic_learning_rate, warmup=0)

    @property
    def value_clip_sides(self) -> Sides | None:
        """Clip range of values around the old ones: one distance for both sides, or one down and
        one up; None is off."""
        return self.value_clip

    @property
    def discount(self) -> float:
        return self.gamma

    def critic_loss(
        self,
        values: Float[Array, "batch time"],
        batch: Batch[Array],
        totals: Totals[Array],
        response_length: int,
    ) -> tuple[Float[Array, ""], dict[str, Mean | ExplainedVariance]]:
        """Half the mean squared error of the values, aggregated as the policy's loss."""
        loss, metrics = value_loss(
            values,
            required(batch.old_values),
            required(batch.returns),
            batch.mask,
            clip=self.value_clip_sides,
            aggregation=self.aggregation,
            # Counts of the critic's own mask, `critic_mask`, which the trainer passes to it.
            **self.denominators(totals, response_length),
        )
        return loss, {f"critic/{name}": value for name, value in metrics.items()}


@dataclass(frozen=True)
class ImitatingActorCritic(ActorCritic):
    """Hyperparameters of the recipes with a critic that imitate their correct completions."""

    positive_coef: float = 0.1
    """Weight of the negative log-likelihood of correct completions, on the tokens of the step in
    which they were finished."""

    def auxiliary_loss(
        self, logprobs: Float[Array, "batch time"], batch: Batch[Array], totals: Totals[Array]
    ) -> tuple[Float[Array, ""], Metrics]:
        """Negative log-likelihood of the completions with full marks, the mean over their tokens in
        the mask (VAPO, arXiv:2504.05118, section 4.3)."""
        imitation, imitated = positive_example_loss(
            logprobs, required(batch.correct), batch.mask, num_tokens=totals.num_correct_tokens
        )
        return self.positive_coef * imitation, {"actor/positive_loss": imitated["positive_nll"]}


@dataclass(frozen=True)
class Ppo(ActorCritic):
    """PPO as used for language models; the defaults fit a laptop."""

    prompts: int = 512
    group_size: int = 1

    lam: float = setting(0.95, minimum=0, maximum=1)
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

    @classmethod
    def paper(cls) -> "Ppo":
        """The vanilla PPO baseline of the VAPO paper: lam 0.95, clip 0.2, one loss per response."""
        return replace(
            cls(),
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
