"""Advantages without a critic: each response against the others that answer the same prompt."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses.arrays import Number, as_floats, check_shapes
from jrl.losses.groups import group_min, group_sum, number_groups


def grpo(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    *,
    scale: Literal["group"] | None = "group",
    epsilon: Number = 1e-6,
) -> Float[Array, "batch"]:
    """Group-relative advantages: each response against the others that answer the same prompt.

    ``A_i = (R_i - mean_g) / (std_g + epsilon)``, with the *unbiased* standard deviation of the
    group. A constant added to the rewards of a group changes nothing.

    A group without variance gets exactly 0: rewards are taken relative to the least of their group
    before anything is averaged, so that rounding cannot be blown up by ``1 / epsilon``. The same
    holds for a group of one, which has nothing to be compared with (verl hands such a row its raw
    reward instead). A row that only fills up a batch disturbs no other if its group is its own.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt; any integers, in any
        order.
      scale: "group" divides by the standard deviation of the group; None does not, which is the
        advantage of Dr. GRPO and keeps easy and hard prompts from being weighted up.
      epsilon: added to the standard deviation.

    Returns:
      One advantage per response, without a gradient. All tokens of a response share it:
      ``ppo_loss(logprobs, old_logprobs, advantages[:, None], mask)``.

    References:
      Shao et al., "DeepSeekMath", 2024, section 4.1.2. https://arxiv.org/abs/2402.03300
      Liu et al., "Understanding R1-Zero-like training", 2025. https://arxiv.org/abs/2503.20783

    >>> import jax.numpy as jnp
    >>> grpo(jnp.array([1.0, 5.0, 0.0]), jnp.array([7, 2, 7]), scale=None).tolist()
    [0.5, 0.0, -0.5]
    """
    check_shapes(rewards=rewards, groups=groups)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    index = number_groups(groups)
    size = group_sum(jnp.ones_like(rewards), index)
    above_least = rewards - group_min(rewards, index)
    advantages = above_least - group_sum(above_least, index) / size
    if scale is None:
        return advantages
    variance = group_sum(advantages**2, index) / jnp.maximum(size - 1, 1)
    return advantages / (jnp.sqrt(variance) + epsilon)
