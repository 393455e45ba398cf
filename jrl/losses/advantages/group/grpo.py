"""GRPO and Dr. GRPO: each response against the others that answer the same prompt."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.groups import check_groups, group_centred, group_size, group_sum, ratio_or_zero


def grpo_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    *,
    scale: Literal["group", "batch"] | None = "group",
    unbiased: bool = True,
    epsilon: Number = 1e-6,
    singleton: Literal["zero", "reward"] = "zero",
) -> Float[Array, "batch"]:
    """Group-relative advantages: each response against the others that answer the same prompt.

    ``A_i = (R_i - mean_g) / (std + epsilon)``, with the standard deviation of the group or of the
    whole batch. A constant added to the rewards of a group changes nothing.

    A group without variance gets exactly 0: rewards are taken relative to the least of their group
    before anything is averaged, so that rounding cannot be blown up by ``1 / epsilon``. The same
    holds for a group of one, which has nothing to be compared with. A row that only fills up a
    batch disturbs no other if its group is its own and `scale` is not "batch".

    Libraries differ: verl has the unbiased deviation and ``epsilon=1e-6`` (the defaults here) and
    hands a group of one its reward; TRL has the unbiased one and ``epsilon=1e-4``; HAPO's release
    has the population's.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt; any integers, in any
        order.
      scale: "group" divides by the standard deviation of the group; "batch" by that of all the
        rewards passed, so pass the whole batch (Lite PPO, and TRL under the same name); None by
        nothing, which is `dr_grpo_advantages`.
      unbiased: divide the squares by ``n - 1`` rather than by ``n`` in the standard deviation.
      epsilon: added to the standard deviation.
      singleton: "zero" gives a group of one 0; "reward" is the rule of verl, which takes its mean
        for 0 and its standard deviation for 1.

    Returns:
      One advantage per response, without a gradient. All tokens of a response share it, as in
      ``ppo_loss(logprobs, old_logprobs, advantages[:, None], mask)``.

    Raises:
      ValueError: if `scale` or `singleton` is none of the above.

    References:
      Shao et al., "DeepSeekMath", 2024, section 4.1.2. https://arxiv.org/abs/2402.03300
      Liu et al., "Part I: Tricks or Traps? A deep dive into RL for LLM reasoning" (Lite PPO), 2025.
      https://arxiv.org/abs/2508.08221

    Examples:
      >>> import jax.numpy as jnp
      >>> grpo_advantages(jnp.array([1.0, 5.0, 0.0]), jnp.array([7, 2, 7]), scale=None).tolist()
      [0.5, 0.0, -0.5]
      >>> pair = jnp.array([3.0, 1.0]), jnp.array([0, 0])
      >>> grpo_advantages(*pair, unbiased=False, epsilon=0.0).tolist()
      [1.0, -1.0]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    if scale not in ("group", "batch", None):
        raise ValueError(f"scale={scale!r} is not a scale: choose 'group', 'batch' or None.")
    if singleton not in ("zero", "reward"):
        raise ValueError(f"singleton={singleton!r} is not a rule: choose 'zero' or 'reward'.")
    epsilon = settings.epsilon("epsilon", epsilon)
    size = group_size(rewards, index)
    bias = 1 if unbiased else 0
    as_rewarded = (size == 1) & (singleton == "reward")
    centred = group_centred(rewards, index)
    advantages = jnp.where(as_rewarded, rewards, centred)
    if scale is None:
        return advantages
    if scale == "group":
        squares = group_sum(centred**2, index)
        deviation = jnp.sqrt(squares / jnp.maximum(size - bias, 1))
        deviation = jnp.where(as_rewarded, 1, deviation)
    else:
        above_least = rewards - jnp.min(rewards, initial=jnp.inf)
        squares = jnp.sum((above_least - jnp.mean(above_least)) ** 2)
        deviation = jnp.sqrt(squares / max(rewards.size - bias, 1))
    return ratio_or_zero(advantages, jnp.broadcast_to(deviation + epsilon, advantages.shape))


def dr_grpo_advantages(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Float[Array, "batch"]:
    """The advantage of Dr. GRPO: the reward minus the mean of its group, and no scale.

    ``A_i = R_i - mean_g``. Without the division by the group's standard deviation, prompts that are
    nearly always or nearly never solved are not weighted up. The other half of Dr. GRPO is the
    aggregation: sums over tokens, divided by a constant length (``seq-mean-token-sum-norm``).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      One advantage per response, without a gradient; 0 in a group of one.

    References:
      Liu et al., "Understanding R1-Zero-like training", 2025. https://arxiv.org/abs/2503.20783

    Examples:
      >>> import jax.numpy as jnp
      >>> dr_grpo_advantages(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 0, 0])).tolist()
      [0.5, -0.5, -0.5, 0.5]
    """
    return grpo_advantages(rewards, groups, scale=None)
