"""From the reward of a completion to those of its tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses import kl_estimate
from jrl.recipes.base.batch import Batch, given


def penalised_rewards(batch: Batch[Array], kl_coef: float | None) -> Float[Array, "batch time"]:
    """The reward of each token: that of the completion on its last one, and on every token
    ``-kl_coef (old_logprobs - reference_logprobs)``, the k1 estimate of the KL divergence."""
    rewards = terminal_rewards(given(batch.rewards), batch.mask)
    if kl_coef is None:
        return rewards
    kl = kl_estimate(
        given(batch.old_logprobs), given(batch.reference_logprobs), batch.mask, kind="k1"
    )
    return rewards - kl_coef * kl


def terminal_rewards(
    rewards: Float[Array, "batch"], mask: Bool[Array, "batch time"]
) -> Float[Array, "batch time"]:
    """Each row's reward on its last sampled token, 0 elsewhere."""
    order = jnp.arange(mask.shape[1])
    # Masks may have holes, so the last token is the last true column and not the length.
    last = jnp.max(jnp.where(mask, order[None, :], -1), axis=1)
    return jnp.where(order[None, :] == last[:, None], rewards[:, None], 0.0)
