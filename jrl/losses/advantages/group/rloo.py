"""RLOO: each response against the mean of the others."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses.groups import check_groups, group_centred, group_size


def rloo_advantages(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Float[Array, "batch"]:
    """REINFORCE leave-one-out: the reward minus the mean of the *other* responses of the group.

    ``A_i = R_i - mean_{j != i} R_j = n / (n - 1) (R_i - mean_g)``. The baseline does not depend on
    the response itself, so the policy gradient stays unbiased; that of `dr_grpo_advantages` is the
    same but for the factor ``(n - 1) / n``.

    A group of one has no others and gets 0 (verl hands it its raw reward).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      One advantage per response, without a gradient.

    References:
      Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization for learning from
      human feedback in LLMs", 2024, section 4. https://arxiv.org/abs/2402.14740

    Examples:
      >>> import jax.numpy as jnp
      >>> rloo_advantages(jnp.array([1.0, 0.0, 2.0, 6.0]), jnp.array([3, 3, 3, 8])).tolist()
      [0.0, -1.5, 1.5, 0.0]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    size = group_size(rewards, index)
    return group_centred(rewards, index) * size / jnp.maximum(size - 1, 1)
