"""Advantages relative to a group whose statistics are those of its tokens, not its responses."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real, Shaped

from jrl.losses import settings
from jrl.losses.advantages.group.grpo import grpo_advantages
from jrl.losses.arrays import (
    Number,
    as_floats,
    as_mask,
    check_responses,
    check_rows,
    zero_masked,
)
from jrl.losses.groups import (
    group_max,
    group_min,
    group_sum,
    isolate_uncounted,
    number_groups,
    ratio_or_zero,
)


def token_level_group_average(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    mask: Shaped[ArrayLike, "batch time"],
    *,
    epsilon: Number = 1e-6,
    fallback: Number | None = None,
) -> Float[Array, "batch time"]:
    """HAPO's token-level group average: each response counts by its tokens in mean and deviation.

    With every token carrying the reward of its response and l the lengths of the group,

        mean = sum_i l_i R_i / sum_i l_i,    std^2 = sum_i l_i (R_i - mean)^2 / sum_i l_i
        A_it = (R_i - mean) / (std + epsilon)

    so that the advantages of all tokens of a group sum to 0 and a token-mean loss does not push
    with the sign of the longer responses. The deviation is the population's. A group without
    variance gets exactly 0.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      mask: true on sampled tokens; holes are legal, and responses without a token do not count.
      epsilon: added to the standard deviation.
      fallback: if a response of a group gets an advantage of this size or beyond, the whole group
        gets those of `grpo_advantages` instead, as in HAPO's release with 5; then tokens no longer
        sum to 0. None never falls back.

    Returns:
      One advantage per token, 0 where the mask is false and without a gradient.

    Raises:
      ValueError: if `fallback` is not positive, or the numbers of rows differ.

    References:
      "HAPO: heterogeneous adaptive policy optimization", 2025, its token-level group average.
      https://arxiv.org/abs/2509.16591

    Examples:
      >>> import jax.numpy as jnp
      >>> mask = jnp.array([[1, 0, 0, 0], [1, 1, 1, 1]])
      >>> rewards, groups = jnp.array([5.0, 0.0]), jnp.array([0, 0])
      >>> token_level_group_average(rewards, groups, mask, epsilon=0.0).tolist()
      [[2.0, 0.0, 0.0, 0.0], [-0.5, -0.5, -0.5, -0.5]]
    """
    mask = as_mask(mask)
    check_responses(rewards=rewards, groups=groups)
    check_rows("mask", mask, rewards=rewards)
    epsilon = settings.epsilon("epsilon", epsilon)
    rule = "must be positive: HAPO uses 5, None is off."
    fallback = settings.optional("fallback", fallback, rule, above=0)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    index = number_groups(groups)
    lengths = jnp.sum(mask, -1, dtype=jnp.int32).astype(rewards.dtype)
    counts = lengths > 0
    least = group_min(jnp.where(counts, rewards, jnp.inf), index)
    # Exactly 0 where all are equal, as their mean would not be.
    above_least = jnp.where(counts, rewards - least, 0)
    tokens = jnp.maximum(group_sum(lengths, index), 1)
    centred = above_least - group_sum(lengths * above_least, index) / tokens
    deviation = jnp.sqrt(group_sum(lengths * centred**2, index) / tokens)
    advantages = zero_masked(ratio_or_zero(centred, deviation + epsilon), counts)
    if fallback is not None:
        beyond = group_max(jnp.abs(advantages), index) >= fallback
        advantages = jnp.where(
            beyond, grpo_advantages(*isolate_uncounted(rewards, index, counts)), advantages
        )
    return zero_masked(jnp.broadcast_to(advantages[:, None], mask.shape), mask)
