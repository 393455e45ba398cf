"""REINFORCE++: the rewards to come, or the group's mean, whitened over the batch."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real, Shaped

from jrl.losses.advantages.group.grpo import dr_grpo_advantages
from jrl.losses.advantages.rewards_to_go.discounted import rewards_to_go
from jrl.losses.advantages.whitening import whiten
from jrl.losses.arrays import (
    Scalar,
    as_floats,
    as_mask,
    check_responses,
    check_rows,
    check_shapes,
    zero_masked,
)
from jrl.losses.groups import isolate_uncounted, number_groups


def reinforce_plus_plus_advantages(
    rewards: Real[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    whitened: bool = True,
) -> Float[Array, "*batch time"]:
    """REINFORCE++: the discounted rewards to come, whitened over all tokens of the batch.

    ``G_t = r_t + gamma_t G_{t+1}`` with t+1 the next token whose mask is true, then
    ``A_t = (G_t - mean) / std`` over the tokens of the batch. The penalty for leaving the reference
    belongs in the rewards here, ``-beta kl_t`` on every token, with the score on the last one.

    A hole in the mask costs no discount (older versions of verl reset the sum at a hole, so that
    what comes before it never hears of the reward). Whitened, the estimate depends on the other
    responses of the batch: pass the whole batch.

    Args:
      rewards: one per token, KL penalties included.
      mask: true on sampled tokens; holes are legal.
      gamma: the discount, in [0, 1]; a scalar or an array as for `gae`.
      whitened: as the paper does, with the unbiased variance (verl's; OpenRLHF has the
        population's, see `whiten`); False returns the rewards to come.

    Returns:
      One advantage per token, 0 where the mask is false and without a gradient.

    Raises:
      ValueError: if shapes do not fit.

    References:
      Hu et al., "REINFORCE++", 2025. https://arxiv.org/abs/2501.03262

    Examples:
      >>> import jax.numpy as jnp
      >>> rewards, mask = jnp.array([[0.0, 0.0, 0.0, 1.0]]), jnp.array([[1, 1, 0, 1]])
      >>> reinforce_plus_plus_advantages(rewards, mask, gamma=0.5, whitened=False).tolist()
      [[0.25, 0.5, 0.0, 1.0]]
    """
    check_shapes(rewards=rewards, mask=mask)
    mask = as_mask(mask)
    (rewards,) = as_floats(rewards)
    to_go = jax.lax.stop_gradient(rewards_to_go(zero_masked(rewards, mask), mask, gamma))
    return whiten(to_go, mask) if whitened else to_go


def reinforce_plus_plus_baseline_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    mask: Shaped[ArrayLike, "batch time"],
) -> Float[Array, "batch time"]:
    """REINFORCE++ with the group as its baseline: minus the group's mean, whitened over the batch.

    ``A_it = (R_i - mean_g - mean) / std``, where the last two are over all *tokens* of the batch,
    so that long responses count more. The scale is one for all groups, unlike that of
    `grpo_advantages`: prompts that are nearly always solved are not weighted up.

    Pass the whole batch. A response without a token is not part of its group (in verl its reward
    counts in the mean). A group of one has nothing to be compared with and enters the whitening
    with 0 (verl hands it its raw reward).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      mask: true on sampled tokens; holes are legal, and responses without a token do not count.

    Returns:
      One advantage per token, 0 where the mask is false and without a gradient.

    Raises:
      ValueError: if the numbers of rows differ.

    References:
      Hu et al., "REINFORCE++", 2025. https://arxiv.org/abs/2501.03262

    Examples:
      >>> import jax.numpy as jnp
      >>> mask = jnp.array([[1, 1], [1, 0]])
      >>> rewards, groups = jnp.array([1.0, 0.0]), jnp.array([0, 0])
      >>> result = reinforce_plus_plus_baseline_advantages(rewards, groups, mask)
      >>> [[round(x, 2) for x in row] for row in result.tolist()]
      [[0.58, 0.58], [-1.15, 0.0]]
    """
    mask = as_mask(mask)
    check_responses(rewards=rewards, groups=groups)
    check_rows("mask", mask, rewards=rewards)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    counted = isolate_uncounted(rewards, number_groups(groups), jnp.any(mask, axis=-1))
    advantages = dr_grpo_advantages(*counted)
    return whiten(jnp.broadcast_to(advantages[:, None], mask.shape), mask)
