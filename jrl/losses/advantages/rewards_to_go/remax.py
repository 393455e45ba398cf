"""ReMax: the rewards to come against those of the greedy response."""

import jax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Real, Shaped

from jrl.losses.advantages.rewards_to_go.discounted import rewards_to_go
from jrl.losses.arrays import (
    as_floats,
    as_mask,
    check_rows,
    check_shapes,
    zero_masked,
)


def remax_advantages(
    rewards: Real[ArrayLike, "*batch time"],
    greedy_rewards: Real[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> Float[Array, "*batch time"]:
    """ReMax: the rewards to come, against the reward of the greedy response to the same prompt.

    ``A_t = sum_{k >= t} r_k - R_greedy`` over the tokens whose mask is true. The greedy response
    costs one more generation per prompt and is itself not learned from.

    Args:
      rewards: one per token; usually zero but for the last sampled one.
      greedy_rewards: the total reward of the greedy response, one per row.
      mask: true on sampled tokens; holes are legal.

    Returns:
      One advantage per token, 0 where the mask is false and without a gradient.

    Raises:
      ValueError: if shapes do not fit.

    References:
      Li et al., "ReMax: a simple, effective, and efficient reinforcement learning method for
      aligning large language models", 2024. https://arxiv.org/abs/2310.10505

    Examples:
      >>> import jax.numpy as jnp
      >>> rewards, greedy = jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), jnp.array([0.25, 1.0])
      >>> remax_advantages(rewards, greedy, jnp.array([[1, 0, 1], [1, 1, 0]])).tolist()
      [[0.75, 0.0, 0.75], [-1.0, -1.0, 0.0]]
    """
    mask = as_mask(mask)
    check_shapes(rewards=rewards, mask=mask)
    rewards, greedy_rewards = as_floats(rewards, greedy_rewards)
    check_rows("rewards", rewards, greedy_rewards=greedy_rewards)
    to_go = rewards_to_go(zero_masked(rewards, mask), mask, 1.0)
    return jax.lax.stop_gradient(zero_masked(to_go - greedy_rewards[..., None], mask))
