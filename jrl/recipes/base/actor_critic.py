"""Recipes with a critic: its optimizer, its loss and the lambdas of its advantages."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float

from jrl.losses import ExplainedVariance, Mean, value_loss
from jrl.losses.settings import Sides
from jrl.recipes.base.batch import Batch, Totals, given
from jrl.recipes.base.optimizer import Optimizer
from jrl.recipes.base.recipe import Recipe


@dataclass(frozen=True)
class ActorCritic(Recipe):
    """Hyperparameters shared by the recipes that train a value network."""

    critic_learning_rate: float = 1e-3
    """Of AdamW, for the critic."""
    value_clip: float | None = None
    """How far a value may move from its old one before its gradient stops; None is off."""
    gamma: float = 1.0
    """Discount per token."""
    pretrain_critic: int = 0
    """Steps at the start in which only the critic learns, on returns of the fixed policy."""

    uses_critic: ClassVar[bool] = True

    @property
    def value_pretraining_steps(self) -> int:
        return self.pretrain_critic

    @property
    def critic_optimizer(self) -> Optimizer:
        """Of the critic."""
        return Optimizer(self.critic_learning_rate, 0, self.weight_decay, self.max_grad_norm)

    @property
    def value_clip_sides(self) -> Sides | None:
        """What bounds the move of a value: one distance, or one down and one up; None is off."""
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
            given(batch.old_values),
            given(batch.returns),
            batch.mask,
            clip=self.value_clip_sides,
            aggregation=self.aggregation,
            # Of the critic's own mask: the trainer counts what it gives the critic (`critic_mask`).
            **self.denominators(totals, response_length),
        )
        return loss, {f"critic/{name}": value for name, value in metrics.items()}
