"""GDPO: advantages from several rewards at once."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses import settings
from jrl.losses.advantages.group.grpo import grpo_advantages
from jrl.losses.arrays import (
    Number,
    as_floats,
    broadcast,
    check_responses,
    check_rows,
)
from jrl.losses.groups import ratio_or_zero


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
    """Group-relative advantages of several rewards, each normalised before they are added.

        S_i = sum_c w_c (R_ic - mean_g,c) / (std_g,c + epsilon)
        A_i = (S_i - mean_batch) / sqrt(variance_batch + whiten_epsilon)

    If rewards are added first, different combinations with the same sum (right but too long, wrong
    but well formatted) become one, and the reward with the widest spread drowns the others. The
    whitening keeps the scale the same for any number of rewards. Both deviations are unbiased.

    The whitening needs all responses: pass the whole batch, without rows that only fill it up.
    Libraries differ in what it averages over: the release and verl over tokens (pass `lengths`),
    TRL over responses, with ``1e-4`` added to the standard deviation.

    Args:
      rewards: one per response and component, unweighted.
      groups: one integer per response, equal for those that share a prompt.
      weights: one per component; None weighs all by 1.
      lengths: sampled tokens per response, ``mask.sum(-1)``, by which each counts in the mean and
        the variance of the batch; None counts each once.
      whitened: False stops at ``S_i``.
      epsilon: added to the standard deviation of a group.
      whiten_epsilon: added to the variance of the batch, inside the root.

    Returns:
      One advantage per response, without a gradient.

    Raises:
      ValueError: if shapes do not fit.

    References:
      Liu et al., "GDPO: group reward-decoupled normalization policy optimization for multi-reward
      RL optimization", 2026. https://arxiv.org/abs/2601.05242

    Examples:
      >>> import jax.numpy as jnp
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
    number = jnp.sum(counts)
    centred = total - jnp.sum(counts * total) / jnp.maximum(number, 1)
    variance = jnp.sum(counts * centred**2) / jnp.maximum(number - 1, 1)
    deviation = jnp.sqrt(variance + whiten_epsilon)
    return ratio_or_zero(centred, jnp.broadcast_to(deviation, centred.shape))
