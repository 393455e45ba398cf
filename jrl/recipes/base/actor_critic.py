"""Recipes with a critic: its optimizer, its loss and the lambdas of its advantages."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float

from jrl.checks import check_range
from jrl.losses import ExplainedVariance, Mean, positive_example_loss, value_loss
from jrl.losses.settings import Sides
from jrl.recipes.base.batch import Batch, Totals, required
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.recipe import Metrics, Recipe


@dataclass(frozen=True)
class ActorCritic(Recipe):
    """Hyperparameters shared by the recipes that train a value network."""

    critic_learning_rate: float = 1e-3
    """Learning rate of AdamW for the critic."""
    value_clip: float | None = None
    """Clip range of the value loss: how far a value may move from its old one before its gradient
    stops; None is off."""
    gamma: float = 1.0
    """Discount per token."""
    pretrain_critic: int = 0
    """Steps at the start that train only the critic, on returns of the frozen policy."""

    uses_critic: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_range(self, ("critic_learning_rate", "value_clip", "pretrain_critic"), 0)
        # Not every recipe has each of these lambdas.
        check_range(self, ("gamma", "lam", "lam_critic", "lam_floor"), 0, 1)

    @property
    def value_pretraining_steps(self) -> int:
        return self.pretrain_critic

    @property
    def critic_optimizer(self) -> Optimizer:
        """Optimizer of the critic."""
        return Optimizer(self.critic_learning_rate, 0, self.weight_decay, self.max_grad_norm)

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
        self,
        logprobs: Float[Array, "batch time"],
        batch: Batch[Array],
        totals: Totals[Array],
    ) -> tuple[Float[Array, ""], Metrics]:
        """Negative log-likelihood of the completions with full marks, the mean over their tokens in
        the mask (VAPO, arXiv:2504.05118, section 4.3)."""
        imitation, imitated = positive_example_loss(
            logprobs, required(batch.correct), batch.mask, num_tokens=totals.num_correct_tokens
        )
        return self.positive_coef * imitation, {"actor/positive_loss": imitated["positive_nll"]}
