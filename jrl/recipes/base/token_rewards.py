"""Token rewards from the reward of a completion."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jrl.losses import kl_estimate
from jrl.recipes.base.batch import Batch, required


def penalised_rewards(batch: Batch[Array], kl_coef: float | None) -> Float[Array, "batch time"]:
    """Reward of each token: that of the completion on its last one or, of a conversation, those of
    turns on the last token of each; plus, on every token,
    ``-kl_coef (old_logprobs - reference_logprobs)``, the k1 estimate of the KL divergence."""
    rewards = per_turn_rewards(batch)
    if kl_coef is None:
        return rewards
    # k1 is unbiased. As a loss its expected gradient would be zero; in a reward it has the right
    # one.
    kl = kl_estimate(
        required(batch.old_logprobs), required(batch.reference_logprobs), batch.mask, kind="k1"
    )
    return rewards - kl_coef * kl


def per_turn_rewards(batch: Batch[Array]) -> Float[Array, "batch time"]:
    """Each row's reward on its last sampled token, except for the rewards of turns before the last,
    which are on the last token of their turn."""
    rewards, turn_rewards = required(batch.rewards), batch.turn_rewards
    if turn_rewards is None:
        return terminal_rewards(rewards, batch.mask)
    # Rewards on tokens that were rejected meanwhile move to the end with the rest.
    turn_rewards = jnp.where(batch.mask, turn_rewards, 0.0)
    return turn_rewards + terminal_rewards(rewards - jnp.sum(turn_rewards, axis=1), batch.mask)


def terminal_rewards(
    rewards: Float[Array, "batch"], mask: Bool[Array, "batch time"]
) -> Float[Array, "batch time"]:
    """Each row's reward on its last sampled token, 0 elsewhere."""
    order = jnp.arange(mask.shape[1])
    # Masks may have holes, so the last token is the last true position and not the length.
    last = jnp.max(jnp.where(mask, order[None, :], -1), axis=1)
    return jnp.where(order[None, :] == last[:, None], rewards[:, None], 0.0)
