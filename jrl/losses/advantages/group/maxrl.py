"""MaxRL: each response in units of its group's success rate."""

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses.groups import check_groups, group_centred, group_size, group_sum, ratio_or_zero


def maxrl_advantages(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Float[Array, "batch"]:
    """Maximum-likelihood RL: the reward against the mean of its group, in units of that mean.

    ``A_i = (R_i - mean_g) / mean_g``, and 0 where the mean is 0. With rewards in {0, 1} the mean is
    the success rate p, and dividing the policy gradient by p makes it that of ``log p``: the score
    function is averaged over the *successes* alone. A prompt that is solved once in sixteen tries
    counts sixteen times as much as with `dr_grpo_advantages`. With n responses a group the
    expectation is the gradient of ``log p`` cut after n terms of its series in ``1 - p``.

    **Rewards must not be negative.** A negative mean turns the sign of every advantage of its
    group around, and a mean near zero between rewards of both signs blows them up; neither can be
    refused while a program is traced. Rewards of -1 and 1 become 0 and 1 by ``(R + 1) / 2``.

    Args:
      rewards: one per response, at least 0; usually 0 or 1.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      One advantage per response, without a gradient; 0 in a group of one or without variance.

    References:
      Tajwar et al., "Maximum likelihood reinforcement learning", 2026.
      https://arxiv.org/abs/2602.02710

    Examples:
      >>> import jax.numpy as jnp
      >>> rewards, groups = jnp.array([1.0, 0.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 0, 0, 1])
      >>> maxrl_advantages(rewards, groups).tolist()
      [3.0, -1.0, -1.0, -1.0, 0.0]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    mean = group_sum(rewards, index) / group_size(rewards, index)
    return ratio_or_zero(group_centred(rewards, index), mean)
