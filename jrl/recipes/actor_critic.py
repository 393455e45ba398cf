"""Recipes with a critic: its optimiser, its loss and the advantages it gives."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float

from jrl.losses import ExplainedVariance, Mean, value_loss
from jrl.recipes.batch import Batch, Totals
from jrl.recipes.recipe import Recipe


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

    def critic_loss(
        self,
        values: Float[Array, "batch time"],
        batch: Batch[Array],
        totals: Totals[Array],
    ) -> tuple[Float[Array, ""], dict[str, Mean | ExplainedVariance]]:
        """This piece's share of the critic's loss of a mini-batch, half the mean squared error."""
        if batch.returns is None or batch.old_values is None:
            raise ValueError("the critic's loss needs returns and old values in the batch.")
        loss, metrics = value_loss(
            values,
            batch.old_values,
            batch.returns,
            batch.mask,
            clip=self.value_clip,
            aggregation=self.aggregation,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
        )
        return loss, {f"critic/{name}": value for name, value in metrics.items()}
