"""Advantages without a critic: each response against the others that answer the same prompt."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses import settings
from jrl.losses.arrays import Number, as_floats, check_responses
from jrl.losses.groups import (
    group_centred,
    group_max,
    group_min,
    group_size,
    group_sum,
    number_groups,
    ratio_or_zero,
)


def grpo(
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
        nothing, which is `dr_grpo`.
      unbiased: divide the squares by ``n - 1`` rather than by ``n`` in the standard deviation.
      epsilon: added to the standard deviation.
      singleton: "zero" gives a group of one 0; "reward" is the rule of verl, which takes its mean
        for 0 and its standard deviation for 1.

    Returns:
      One advantage per response, without a gradient. All tokens of a response share it:
      ``ppo_loss(logprobs, old_logprobs, advantages[:, None], mask)``.

    Raises:
      ValueError: if `scale` or `singleton` is none of the above.

    References:
      Shao et al., "DeepSeekMath", 2024, section 4.1.2. https://arxiv.org/abs/2402.03300
      Liu et al., "Part I: Tricks or Traps? A deep dive into RL for LLM reasoning" (Lite PPO), 2025.
      https://arxiv.org/abs/2508.08221

    >>> import jax.numpy as jnp
    >>> grpo(jnp.array([1.0, 5.0, 0.0]), jnp.array([7, 2, 7]), scale=None).tolist()
    [0.5, 0.0, -0.5]
    >>> grpo(jnp.array([3.0, 1.0]), jnp.array([0, 0]), unbiased=False, epsilon=0.0).tolist()
    [1.0, -1.0]
    """
    check_responses(rewards=rewards, groups=groups)
    if scale not in ("group", "batch", None):
        raise ValueError(f"scale={scale!r} is not a scale: choose 'group', 'batch' or None.")
    if singleton not in ("zero", "reward"):
        raise ValueError(f"singleton={singleton!r} is not a rule: choose 'zero' or 'reward'.")
    epsilon = settings.epsilon("epsilon", epsilon)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    index = number_groups(groups)
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


def dr_grpo(
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

    >>> import jax.numpy as jnp
    >>> dr_grpo(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 0, 0])).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    return grpo(rewards, groups, scale=None)


def rloo(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Float[Array, "batch"]:
    """REINFORCE leave-one-out: the reward minus the mean of the *other* responses of the group.

    ``A_i = R_i - mean_{j != i} R_j = n / (n - 1) (R_i - mean_g)``. The baseline does not depend on
    the response itself, so the policy gradient stays unbiased; that of `dr_grpo` is the same but
    for the factor ``(n - 1) / n``.

    A group of one has no others and gets 0 (verl hands it its raw reward).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      One advantage per response, without a gradient.

    References:
      Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization for learning from
      human feedback in LLMs", 2024, section 4. https://arxiv.org/abs/2402.14740

    >>> import jax.numpy as jnp
    >>> rloo(jnp.array([1.0, 0.0, 2.0, 6.0]), jnp.array([3, 3, 3, 8])).tolist()
    [0.0, -1.5, 1.5, 0.0]
    """
    check_responses(rewards=rewards, groups=groups)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    index = number_groups(groups)
    size = group_size(rewards, index)
    return group_centred(rewards, index) * size / jnp.maximum(size - 1, 1)


def maxrl(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Float[Array, "batch"]:
    """Maximum-likelihood RL: the reward against the mean of its group, in units of that mean.

    ``A_i = (R_i - mean_g) / mean_g``, and 0 where the mean is 0. With rewards in {0, 1} the mean is
    the success rate p, and dividing the policy gradient by p makes it that of ``log p``: the score
    function is averaged over the *successes* alone. A prompt that is solved once in sixteen tries
    counts sixteen times as much as with `dr_grpo`. With n responses a group the expectation is the
    gradient of ``log p`` cut after n terms of its series in ``1 - p``.

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

    >>> import jax.numpy as jnp
    >>> maxrl(jnp.array([1.0, 0.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 0, 0, 1])).tolist()
    [3.0, -1.0, -1.0, -1.0, 0.0]
    """
    check_responses(rewards=rewards, groups=groups)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    index = number_groups(groups)
    mean = group_sum(rewards, index) / group_size(rewards, index)
    return ratio_or_zero(group_centred(rewards, index), mean)


def opo(
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

    >>> import jax.numpy as jnp
    >>> opo(jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([1, 3])).tolist()
    [0.75, -0.25]
    """
    check_responses(rewards=rewards, groups=groups, lengths=lengths)
    rewards, lengths = as_floats(*jax.lax.stop_gradient((rewards, lengths)))
    index = number_groups(groups)
    counts = lengths != 0
    least = group_min(jnp.where(counts, rewards, jnp.inf), index)
    # Exactly 0 where all are equal, as their mean would not be.
    above_least = rewards - least
    tokens = group_sum(lengths, index)
    weighted = jnp.where(counts, lengths * above_least, 0)
    baseline = ratio_or_zero(group_sum(weighted, index), tokens)
    return jnp.where(tokens == 0, 0, above_least - baseline)


def gpg(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    *,
    alpha: Literal["informative", "nonzero"] | Number = "informative",
) -> Float[Array, "batch"]:
    """Group policy gradient: the reward minus the mean of its group, rescaled for empty groups.

    ``A_i = alpha (R_i - mean_g)``. Groups in which all rewards are equal add nothing to the
    gradient but still count in the mean over the batch; ``alpha = batch / (rows that count)``
    makes up for them. The loss that goes with it has no ratio and no clip: ``-A log pi``.

    The count is over the array that is passed, so pass the whole batch; rows that only fill it up
    count too.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      alpha: "informative" counts the rows of groups with different rewards, which is the purpose
        the paper gives; "nonzero" counts the rows with a reward other than 0 as verl does, which
        is always all of them when rewards are -1 and 1; a number is used as it is, such as 1 to
        leave the scale alone.

    Returns:
      One advantage per response, without a gradient; 0 in a group of one.

    Raises:
      ValueError: if `alpha` is none of the above.

    References:
      Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning",
      2025. https://arxiv.org/abs/2504.02546

    >>> import jax.numpy as jnp
    >>> gpg(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    check_responses(rewards=rewards, groups=groups)
    if isinstance(alpha, str) and alpha not in ("informative", "nonzero"):
        raise ValueError(f"alpha={alpha!r} is unknown: 'informative', 'nonzero' or a number.")
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    index = number_groups(groups)
    advantages = group_centred(rewards, index)
    if not isinstance(alpha, str):
        return settings.number("alpha", alpha) * advantages
    differ = group_max(rewards, index) > group_min(rewards, index)
    counts = differ if alpha == "informative" else rewards != 0
    number = jnp.sum(counts, dtype=jnp.int32).astype(rewards.dtype)
    return advantages * (rewards.size / jnp.maximum(number, 1))
