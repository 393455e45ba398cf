"""Imitation of the policy's own successes, beside the policy loss."""

from jaxtyping import Array, Float

from jrl.losses import positive_example_loss
from jrl.recipes.base.batch import Batch, Totals, given
from jrl.recipes.base.recipe import Metrics


def imitation_of_correct(
    logprobs: Float[Array, "batch time"],
    batch: Batch[Array],
    totals: Totals[Array],
    coef: float,
) -> tuple[Float[Array, ""], Metrics]:
    """`coef` times the negative log-likelihood of the responses with full marks, a mean over their
    tokens in the mask, and its metric (VAPO, arXiv:2504.05118, section 4.3)."""
    imitation, imitated = positive_example_loss(
        logprobs, given(batch.correct), batch.mask, num_tokens=totals.num_correct_tokens
    )
    return coef * imitation, {"actor/positive_loss": imitated["positive_nll"]}
