"""Imitation of the policy's own successes, beside the policy loss."""

from dataclasses import dataclass

from jaxtyping import Array, Float

from jrl.losses import positive_example_loss
from jrl.recipes.base.actor_critic import ActorCritic
from jrl.recipes.base.batch import Batch, Totals, given
from jrl.recipes.base.recipe import Metrics


@dataclass(frozen=True)
class ImitatingActorCritic(ActorCritic):
    """Hyperparameters of the recipes with a critic that imitate their successes."""

    positive_coef: float = 0.1
    """Weight of the negative log-likelihood of correct completions, on the tokens of the step in
    which they were finished."""

    def auxiliary_loss(
        self,
        logprobs: Float[Array, "batch time"],
        batch: Batch[Array],
        totals: Totals[Array],
    ) -> tuple[Float[Array, ""], Metrics]:
        """Of the completions with full marks, a mean over their tokens in the mask (VAPO,
        arXiv:2504.05118, section 4.3)."""
        imitation, imitated = positive_example_loss(
            logprobs, given(batch.correct), batch.mask, num_tokens=totals.num_correct_tokens
        )
        return self.positive_coef * imitation, {"actor/positive_loss": imitated["positive_nll"]}
