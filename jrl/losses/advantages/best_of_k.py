"""Advantages for pass@k objectives: the maximum reward of k responses."""

from typing import Literal, SupportsIndex

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses import settings
from jrl.losses.arrays import Number, ratio_or_zero
from jrl.losses.groups import check_groups, group_centred, group_max, group_size, group_sum

__all__ = ["pass_at_k_advantages", "pass_at_k_exact_advantages"]


def pass_at_k_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    *,
    scale: Literal["group"] | None = "group",
    epsilon: Number = 1e-6,
) -> Float[Array, "batch"]:
    """Pass@k advantages with k the group size: nonzero for the best response of the group only.

    ``A_best = (R_best - R_second) / (std_g + epsilon)`` with the unbiased standard deviation, and 0
    for the others. ``R_best - R_second`` is the drop of the group's maximum without its best
    response, so k is the size of the group. See `pass_at_k_exact_advantages` for a smaller k.

    If several responses share the best reward, the maximum does not depend on any of them, and all
    get 0. A group of one, which has no second response, gets 0 (verl raises an error).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      scale: "group" divides by the standard deviation of the group; None does not.
      epsilon: added to the standard deviation.

    Returns:
      One advantage per response, at least 0 (gradient stopped).

    Raises:
      ValueError: if `scale` is none of the above.

    References:
      Tang et al., "Optimizing language models for inference time objectives using reinforcement
      learning", 2025. https://arxiv.org/abs/2503.19595

    Examples:
      >>> rewards, groups = jnp.array([1.0, 4.0, 2.0, 3.0, 3.0]), jnp.array([0, 0, 0, 1, 1])
      >>> pass_at_k_advantages(rewards, groups, scale=None).tolist()
      [0.0, 2.0, 0.0, 0.0, 0.0]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    if scale not in ("group", None):
        raise ValueError(f"scale={scale!r} is not a scale: choose 'group' or None.")
    epsilon = settings.epsilon("epsilon", epsilon)
    size = group_size(rewards, index)
    best = rewards == group_max(rewards, index)
    second = group_max(jnp.where(best, -jnp.inf, rewards), index)
    is_unique_best = best & (group_sum(best.astype(rewards.dtype), index) == 1) & (size > 1)
    advantages = jnp.where(is_unique_best, rewards - second, 0)
    if scale is None:
        return advantages
    squares = group_sum(group_centred(rewards, index) ** 2, index)
    deviation = jnp.sqrt(squares / jnp.maximum(size - 1, 1))
    return ratio_or_zero(advantages, deviation + epsilon)


def pass_at_k_exact_advantages(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"], *, k: SupportsIndex
) -> Float[Array, "batch"]:
    """Unbiased pass@k (best-of-k) advantages from groups of at least k responses.

    The gain of a response over the best of ``k - 1`` others, averaged over all subsets of them:

        A_i = k mean_J max(R_i - max_{j in J} R_j, 0),    J = k - 1 of the other responses

    The mean of ``A_i grad log pi_i`` over the group is an unbiased estimate of the gradient of
    ``E max(R_1, ..., R_k)``, which for rewards in {0, 1} is pass@k. With such rewards, a wrong
    response gets 0 and each of c right ones ``k C(n - c, k - 1) / C(n - 1, k - 1)``, which is 0 for
    prompts with fewer than ``k - 1`` wrong responses. With k the size of the group this is
    `pass_at_k_advantages` with ``scale=None``, times k.

    It is n times the "leave one out minus one" reward of the paper, where the sum over the group,
    not the mean, estimates the gradient. A group smaller than k gets 0.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      k: the k of pass@k, at least 2. (For k = 1 see `rloo_advantages`.)

    Returns:
      One advantage per response, at least 0 (gradient stopped).

    Raises:
      ValueError: if `k` is less than 2.

    References:
      Walder and Karkhanis, "Pass@K policy optimization: solving harder reinforcement learning
      problems", 2025.
      https://arxiv.org/abs/2505.15201

    Examples:
      >>> rewards, groups = jnp.array([1.0, 0.0, 0.0, 0.0, 1.0]), jnp.zeros(5, int)
      >>> pass_at_k_exact_advantages(rewards, groups, k=2).tolist()
      [1.5, 0.0, 0.0, 0.0, 1.5]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    rule = "must be at least 2: for single responses use rloo_advantages."
    k = settings.integer("k", k, rule, at_least=2)
    order = jnp.lexsort((rewards, index))
    ascending, index = rewards[order], index[order]
    starts = jnp.concatenate([jnp.ones_like(index[:1], bool), index[1:] != index[:-1]])
    row = jnp.arange(rewards.size)
    below = (row - jax.lax.cummax(jnp.where(starts, row, 0))).astype(rewards.dtype)
    others = group_size(ascending, index) - 1

    # C(below, k - 1) / C(others, k - 1), the probability that all of J is among the rows below.
    chance = jnp.ones_like(rewards)
    for num_removed in range(k - 1):
        chance = chance * ratio_or_zero(
            jnp.maximum(below - num_removed, 0), jnp.maximum(others - num_removed, 0)
        )
    gaps = jnp.where(starts, 0, ascending - jnp.roll(ascending, 1))

    def follow(left, right):
        total, starts_left = left
        more, starts_right = right
        return jnp.where(starts_right, more, total + more), starts_left | starts_right

    gains, _ = jax.lax.associative_scan(follow, (chance * gaps, starts))
    return jnp.zeros_like(rewards).at[order].set(k * gains)
