"""The rewards that follow each token."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float

from jrl.losses import settings
from jrl.losses.advantages.critic.recursion import discounted_errors
from jrl.losses.arrays import (
    Scalar,
    broadcastable,
    zero_per_row,
)


def rewards_to_go(
    rewards: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
    gamma: Scalar | Float[ArrayLike, "*#batch #time"],
) -> Float[Array, "*batch time"]:
    """``G_t = r_t + gamma_t G_{t+1}`` over the true tokens; `rewards` are 0 elsewhere."""
    nothing = jnp.zeros_like(rewards)
    gamma, one = settings.discount("gamma", gamma), jnp.ones((), rewards.dtype)
    discount = broadcastable("gamma", gamma, rewards)
    # Without values, and with lam 1, the recursion of `gae` is that of the rewards to come.
    return discounted_errors(rewards, nothing, mask, discount, one, zero_per_row(rewards))
