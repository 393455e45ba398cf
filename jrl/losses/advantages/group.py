"""Group-relative advantages: GRPO, Dr. GRPO, RLOO, MaxRL, OPO, GPG, GDPO and HAPO."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Integer, Real, Shaped

from jrl.losses import settings
from jrl.losses.arrays import (
    Number,
    as_floats,
    as_mask,
    broadcast,
    check_responses,
    check_rows,
    num_true,
    ratio_or_zero,
    zero_masked,
)
from jrl.losses.groups import (
    check_groups,
    group_centred,
    group_max,
    group_min,
    group_size,
    group_sum,
    isolate_uncounted,
)

__all__ = [  # noqa: RUF022 - in reading order
    "grpo_advantages",
    "dr_grpo_advantages",
    "rloo_advantages",
    "maxrl_advantages",
    "opo_advantages",
    "gpg_advantages",
    "gdpo_advantages",
    "token_level_group_average",
]


def grpo_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    *,
    scale: Literal["group", "batch"] | None = "group",
    unbiased: bool = True,
    epsilon: Number = 1e-6,
    singleton: Literal["zero", "reward"] = "zero",
) -> Float[Array, "batch"]:
    """Group-relative advantages of GRPO: rewards normalised within the responses to a prompt.

    ``A_i = (R_i - mean_g) / (std + epsilon)``, with the standard deviation of the group or of the
    whole batch. Adding a constant to the rewards of a group does not change the advantages.

    Advantages are exactly 0 in a group without variance: the group's minimum is subtracted before
    averaging, so that ``1 / epsilon`` does not amplify rounding errors. By default they are also 0
    in a group of one. A padding row does not affect other rows if it has a group of its own and
    `scale` is not "batch".

    The defaults are verl's, except that verl uses ``singleton="reward"``; TRL has
    ``epsilon=1e-4``, HAPO's release the population standard deviation.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt; any integers, in any
        order.
      scale: "group" divides by the standard deviation of the group; "batch" by the standard
        deviation of all `rewards`, so pass the whole batch (Lite PPO, and TRL under the same name);
        None does not divide, as `dr_grpo_advantages`.
      unbiased: divide the squares by ``n - 1`` rather than by ``n`` in the standard deviation.
      epsilon: added to the standard deviation.
      singleton: "zero" is an advantage of 0 in a group of one; "reward" uses mean 0 and standard
        deviation 1 there, as verl does.

    Returns:
      One advantage per response (gradient stopped). All tokens of a response share it, as in
      ``ppo_loss(logprobs, old_logprobs, advantages[:, None], mask)``.

    Raises:
      ValueError: if `scale` or `singleton` is none of the above.

    References:
      Shao et al., "DeepSeekMath", 2024, section 4.1.2. https://arxiv.org/abs/2402.03300
      Liu et al., "Part I: Tricks or Traps? A deep dive into RL for LLM reasoning" (Lite PPO), 2025.
      https://arxiv.org/abs/2508.08221

    Examples:
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
    """Advantages of Dr. GRPO: the reward minus the mean of its group, without scaling.

    ``A_i = R_i - mean_g``. Without the division by the group's standard deviation, prompts that are
    nearly always or nearly never solved are not weighted up. Dr. GRPO also changes the aggregation:
    sums over tokens are divided by a constant length (``seq-mean-token-sum-norm``).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      One advantage per response (gradient stopped); 0 in a group of one.

    References:
      Liu et al., "Understanding R1-Zero-like training", 2025. https://arxiv.org/abs/2503.20783

    Examples:
      >>> dr_grpo_advantages(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 0, 0])).tolist()
      [0.5, -0.5, -0.5, 0.5]
    """
    return grpo_advantages(rewards, groups, scale=None)


def rloo_advantages(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Float[Array, "batch"]:
    """REINFORCE leave-one-out (RLOO): reward minus the mean of the *other* responses of the group.

    ``A_i = R_i - mean_{j != i} R_j = n / (n - 1) (R_i - mean_g)``. The baseline does not depend on
    the response itself, so the policy gradient is unbiased. With `dr_grpo_advantages` it is the
    same gradient times ``(n - 1) / n``.

    A group of one gets 0 (in verl its raw reward).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      One advantage per response (gradient stopped).

    References:
      Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization for learning from
      human feedback in LLMs", 2024, section 4. https://arxiv.org/abs/2402.14740

    Examples:
      >>> rloo_advantages(jnp.array([1.0, 0.0, 2.0, 6.0]), jnp.array([3, 3, 3, 8])).tolist()
      [0.0, -1.5, 1.5, 0.0]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    size = group_size(rewards, index)
    return group_centred(rewards, index) * size / jnp.maximum(size - 1, 1)


def maxrl_advantages(
    rewards: Real[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> Float[Array, "batch"]:
    """Maximum-likelihood RL (MaxRL): reward minus the mean of its group, divided by that mean.

    ``A_i = (R_i - mean_g) / mean_g``, and 0 where the mean is 0. With rewards in {0, 1} the mean is
    the success rate p, and dividing the policy gradient by p makes it the gradient of ``log p``:
    the score function is averaged over the *successes* only. A prompt solved once in 16 tries has
    16 times the weight that it has with `dr_grpo_advantages`. With n responses per group, the
    expectation is the gradient of ``log p`` truncated after n terms of its series in ``1 - p``.

    **Rewards must not be negative.** A negative mean flips the sign of all advantages of its group,
    and a mean near zero of rewards of both signs makes them very large. Neither is checked, as
    rewards may be traced. Map rewards of -1 and 1 to 0 and 1 by ``(R + 1) / 2``.

    Args:
      rewards: one per response, at least 0; usually 0 or 1.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      One advantage per response (gradient stopped); 0 in a group of one or without variance.

    References:
      Tajwar et al., "Maximum likelihood reinforcement learning", 2026.
      https://arxiv.org/abs/2602.02710

    Examples:
      >>> rewards, groups = jnp.array([1.0, 0.0, 0.0, 0.0, 0.0]), jnp.array([0, 0, 0, 0, 1])
      >>> maxrl_advantages(rewards, groups).tolist()
      [3.0, -1.0, -1.0, -1.0, 0.0]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    mean = group_sum(rewards, index) / group_size(rewards, index)
    return ratio_or_zero(group_centred(rewards, index), mean)


def opo_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    lengths: Real[ArrayLike, "batch"],
) -> Float[Array, "batch"]:
    """Advantages of OPO (optimal reward baseline): reward minus the length-weighted group mean.

    ``A_i = R_i - sum_j l_j R_j / sum_j l_j`` over the responses j of the group. The
    minimum-variance baseline weights each reward by the squared norm of its score function, which
    is proportional to the length if tokens contribute to it equally and independently.

    A group of one gets 0 (in verl its raw reward), and so does a group of empty responses.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      lengths: sampled tokens per response, ``mask.sum(-1)``. A response of length 0 does not affect
        the advantages of the others.

    Returns:
      One advantage per response (gradient stopped). Summed over all tokens of a group they are 0.

    References:
      Hao et al., "On-policy RL with optimal reward baseline", 2025.
      https://arxiv.org/abs/2505.23585

    Examples:
      >>> opo_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([1, 3])).tolist()
      [0.75, -0.25]
    """
    return _centred_by_length(*check_groups(groups, rewards=rewards, lengths=lengths))


def _centred_by_length(
    rewards: Float[Array, "batch"], lengths: Float[Array, "batch"], index: Int[Array, "batch"]
) -> Float[Array, "batch"]:
    """Rewards minus the length-weighted mean of their group; 0 in a group of empty responses."""
    counts = lengths != 0
    least = group_min(jnp.where(counts, rewards, jnp.inf), index)
    # Exactly 0 if all are equal; minus their mean there may be a rounding error.
    above_least = rewards - least
    tokens = group_sum(lengths, index)
    weighted = jnp.where(counts, lengths * above_least, 0)
    baseline = ratio_or_zero(group_sum(weighted, index), tokens)
    return jnp.where(tokens == 0, 0, above_least - baseline)


def gpg_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    *,
    alpha: Literal["informative", "nonzero"] | Number = "informative",
) -> Float[Array, "batch"]:
    """Group policy gradient (GPG): reward minus group mean, rescaled for zero-variance groups.

    ``A_i = alpha (R_i - mean_g)``. Groups in which all rewards are equal have no gradient but are
    counted in the mean over the batch; ``alpha = batch / counted rows`` compensates for them. Its
    loss is ``-A log pi``, without ratio or clip.

    Rows are counted in the array `rewards`, padding rows included: pass the whole batch.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      alpha: "informative" counts the rows of groups with different rewards, as the paper intends;
        "nonzero" counts the rows with a nonzero reward, as verl does, which are all rows if rewards
        are -1 and 1; a number is used as alpha itself, such as 1 for no rescaling.

    Returns:
      One advantage per response (gradient stopped); 0 in a group of one.

    Raises:
      ValueError: if `alpha` is none of the above.

    References:
      Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning",
      2025. https://arxiv.org/abs/2504.02546

    Examples:
      >>> gpg_advantages(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 1, 1])).tolist()
      [1.0, -1.0, 0.0, 0.0]
    """
    rewards, index = check_groups(groups, rewards=rewards)
    if isinstance(alpha, str) and alpha not in ("informative", "nonzero"):
        raise ValueError(f"alpha={alpha!r} is unknown: 'informative', 'nonzero' or a number.")
    advantages = group_centred(rewards, index)
    if not isinstance(alpha, str):
        return settings.number("alpha", alpha) * advantages
    differ = group_max(rewards, index) > group_min(rewards, index)
    counts = differ if alpha == "informative" else rewards != 0
    num_counted = num_true(counts).astype(rewards.dtype)
    return advantages * (rewards.size / jnp.maximum(num_counted, 1))


def gdpo_advantages(
    rewards: Real[ArrayLike, "batch component"],
    groups: Integer[ArrayLike, "batch"],
    *,
    weights: Real[ArrayLike, "component"] | None = None,
    lengths: Real[ArrayLike, "batch"] | None = None,
    whitened: bool = True,
    epsilon: Number = 1e-6,
    whiten_epsilon: Number = 1e-8,
) -> Float[Array, "batch"]:
    """GDPO advantages for multiple rewards: each is normalised within its group before the sum.

        S_i = sum_c w_c (R_ic - mean_g,c) / (std_g,c + epsilon)
        A_i = (S_i - mean_batch) / sqrt(variance_batch + whiten_epsilon)

    If rewards are added first, different combinations with the same sum (right but too long, wrong
    but well formatted) are indistinguishable, and the reward with the largest variance dominates.
    Whitening makes the scale independent of their number. Both deviations are unbiased.

    The whitening needs all responses: pass the whole batch, without padding rows. Libraries differ
    in its average: GDPO's release and verl average over tokens (pass `lengths`), TRL over
    responses, with ``1e-4`` added to the standard deviation.

    Args:
      rewards: one per response and component, unweighted.
      groups: one integer per response, equal for those that share a prompt.
      weights: one per component; None is 1 for all.
      lengths: sampled tokens per response, ``mask.sum(-1)``, its weight in the mean and variance of
        the batch; None weights responses equally.
      whitened: False returns ``S_i``.
      epsilon: added to the standard deviation of a group.
      whiten_epsilon: added to the variance of the batch, inside the root.

    Returns:
      One advantage per response (gradient stopped).

    References:
      Liu et al., "GDPO: group reward-decoupled normalization policy optimization for multi-reward
      RL optimization", 2026. https://arxiv.org/abs/2601.05242

    Examples:
      >>> rewards = jnp.array([[1.0, 100.0], [0.0, 100.0], [1.0, 300.0], [0.0, 300.0]])
      >>> groups, weights = jnp.array([0, 0, 0, 0]), jnp.array([1.0, 0.5])
      >>> result = gdpo_advantages(rewards, groups, weights=weights, whitened=False)
      >>> [round(x, 2) for x in result.tolist()]
      [0.43, -1.3, 1.3, -0.43]
    """
    (rewards,) = as_floats(rewards)
    if rewards.ndim != 2:
        raise ValueError(
            f"rewards has shape {rewards.shape} and must be [batch, component], one column per "
            "reward: for a single one give rewards[:, None]."
        )
    check_responses(groups=groups)
    check_rows("rewards", rewards, groups=groups)
    whiten_epsilon = settings.epsilon("whiten_epsilon", whiten_epsilon)
    like = jnp.zeros(rewards.shape[1:], rewards.dtype)
    weights = broadcast("weights", 1.0 if weights is None else weights, like)
    weights = jax.lax.stop_gradient(weights)
    normalised = [grpo_advantages(component, groups, epsilon=epsilon) for component in rewards.T]
    total = jnp.sum(jnp.stack(normalised, axis=1) * weights[None, :], axis=1)
    if not whitened:
        return total
    counts = broadcast("lengths", 1.0 if lengths is None else lengths, total)
    counts = jax.lax.stop_gradient(counts)
    num_tokens = jnp.sum(counts)
    centred = total - jnp.sum(counts * total) / jnp.maximum(num_tokens, 1)
    variance = jnp.sum(counts * centred**2) / jnp.maximum(num_tokens - 1, 1)
    deviation = jnp.sqrt(variance + whiten_epsilon)
    return ratio_or_zero(centred, jnp.broadcast_to(deviation, centred.shape))


def token_level_group_average(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    mask: Shaped[ArrayLike, "batch time"],
    *,
    epsilon: Number = 1e-6,
    fallback: Number | None = None,
) -> Float[Array, "batch time"]:
    """Token-level group average of HAPO: rewards normalised by length-weighted mean and deviation.

    Every token has the reward of its response. With l the lengths of the responses of the group,

        mean = sum_i l_i R_i / sum_i l_i,    std^2 = sum_i l_i (R_i - mean)^2 / sum_i l_i
        A_it = (R_i - mean) / (std + epsilon)

    so that the advantages of all tokens of a group sum to 0, and longer responses do not bias the
    sign of a token-mean loss. The standard deviation is the population's. A group without
    variance gets exactly 0.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      mask: true on sampled tokens; holes are allowed, and empty responses are excluded.
      epsilon: added to the standard deviation.
      fallback: if the absolute advantage of any response of a group is at least this, the whole
        group gets `grpo_advantages` instead, as in HAPO's release with 5; its tokens then do not
        sum to 0. None disables it.

    Returns:
      One advantage per token, 0 where the mask is false (gradient stopped).

    Raises:
      ValueError: if `fallback` is not positive.

    References:
      "HAPO: heterogeneous adaptive policy optimization", 2025, its token-level group average.
      https://arxiv.org/abs/2509.16591

    Examples:
      >>> mask = jnp.array([[1, 0, 0, 0], [1, 1, 1, 1]])
      >>> rewards, groups = jnp.array([5.0, 0.0]), jnp.array([0, 0])
      >>> token_level_group_average(rewards, groups, mask, epsilon=0.0).tolist()
      [[2.0, 0.0, 0.0, 0.0], [-0.5, -0.5, -0.5, -0.5]]
    """
    mask = as_mask(mask)
    rewards, index = check_groups(groups, rewards=rewards)
    check_rows("mask", mask, rewards=rewards)
    epsilon = settings.epsilon("epsilon", epsilon)
    rule = "must be positive: HAPO uses 5, None is off."
    fallback = settings.optional("fallback", fallback, rule, above=0)
    lengths = num_true(mask, -1).astype(rewards.dtype)
    counts = lengths > 0
    centred = zero_masked(_centred_by_length(rewards, lengths, index), counts)
    tokens = jnp.maximum(group_sum(lengths, index), 1)
    deviation = jnp.sqrt(group_sum(lengths * centred**2, index) / tokens)
    advantages = ratio_or_zero(centred, deviation + epsilon)
    if fallback is not None:
        beyond = group_max(jnp.abs(advantages), index) >= fallback
        advantages = jnp.where(
            beyond, grpo_advantages(*isolate_uncounted(rewards, index, counts)), advantages
        )
    return zero_masked(jnp.broadcast_to(advantages[:, None], mask.shape), mask)
