"""OPO: the group's mean by length, the baseline with the least variance."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses.groups import check_groups, group_min, group_sum, ratio_or_zero


def opo_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    lengths: Real[ArrayLike, "batch"],
) -> Float[Array, "batch"]:
    """On-policy RL with the optimal baseline: the mean of the group, weighted by length.

    ``A_i = R_i - sum_j l_j R_j / sum_j l_j`` over the responses j of the group. The baseline with
    the least variance weighs each reward by the squared norm of its score function; if tokens
    contribute to that norm alike and independently, it is proportional to the length.

    A group of one gets 0 (verl hands it its raw reward), and so does one without a token.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      lengths: sampled tokens per response, ``mask.sum(-1)``. A response of length 0 has no part in
        the advantages of the others, whatever its reward.

    Returns:
      One advantage per response, without a gradient. In each group those of all tokens sum to 0.

    References:
      Hao et al., "On-policy RL with optimal reward baseline", 2025.
      https://arxiv.org/abs/2505.23585

    Examples:
      >>> import jax.numpy as jnp
      >>> opo_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([1, 3])).tolist()
      [0.75, -0.25]
    """
    rewards, lengths, index = check_groups(groups, rewards=rewards, lengths=lengths)
    counts = lengths != 0
    least = group_min(jnp.where(counts, rewards, jnp.inf), index)
    # Exactly 0 where all are equal, as their mean would not be.
    above_least = rewards - least
    tokens = group_sum(lengths, index)
    weighted = jnp.where(counts, lengths * above_least, 0)
    baseline = ratio_or_zero(group_sum(weighted, index), tokens)
    return jnp.where(tokens == 0, 0, above_least - baseline)
