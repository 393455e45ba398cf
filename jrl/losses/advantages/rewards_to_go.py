"""Advantages from per-token returns (rewards-to-go) minus a baseline: REINFORCE++, ReMax, OTB."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Integer, Real, Shaped

from jrl.losses import settings
from jrl.losses.advantages.group import dr_grpo_advantages
from jrl.losses.advantages.recursion import discounted_errors
from jrl.losses.advantages.whitening import whiten
from jrl.losses.arrays import (
    Number,
    Scalar,
    as_floats,
    as_mask,
    broadcast,
    broadcastable,
    check_responses,
    check_rows,
    check_shapes,
    ratio_or_zero,
    zero_masked,
    zero_per_row,
)
from jrl.losses.groups import isolate_uncounted, number_groups

__all__ = [  # noqa: RUF022 - in reading order
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "optimal_token_baseline",
]


def rewards_to_go(
    rewards: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
    gamma: Scalar | Float[ArrayLike, "*#batch #time"],
) -> Float[Array, "*batch time"]:
    """Returns ``G_t = r_t + gamma_t G_{t+1}`` over unmasked tokens; masked rewards must be 0."""
    nothing = jnp.zeros_like(rewards)
    gamma, one = settings.discount("gamma", gamma), jnp.ones((), rewards.dtype)
    discount = broadcastable("gamma", gamma, rewards)
    # With values 0 and lam 1, the recursion of GAE is the recursion of the return.
    return discounted_errors(rewards, nothing, mask, discount, one, zero_per_row(rewards))


def reinforce_plus_plus_advantages(
    rewards: Real[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    whitened: bool = True,
) -> Float[Array, "*batch time"]:
    """REINFORCE++ advantages: discounted returns, whitened over all tokens of the batch.

    ``G_t = r_t + gamma_t G_{t+1}`` with t+1 the next unmasked token, then
    ``A_t = (G_t - mean) / std`` over the tokens of the batch. The KL penalty against the reference
    model belongs in the rewards: ``-beta kl_t`` on every token, plus the score on the last one.

    A hole in the mask is not discounted. (Older versions of verl reset the sum at a hole, so that
    tokens before it do not receive the reward.) Whitened advantages depend on the other responses
    of the batch: pass the whole batch.

    Args:
      rewards: one per token, KL penalties included.
      mask: true on sampled tokens; holes are allowed.
      gamma: the discount, in [0, 1]; a scalar or an array as for `gae`.
      whitened: True whitens as in the paper, with the unbiased variance (as verl; OpenRLHF has the
        population variance, see `whiten`); False returns ``G_t``.

    Returns:
      One advantage per token, 0 where the mask is false (gradient stopped).

    References:
      Hu et al., "REINFORCE++", 2025. https://arxiv.org/abs/2501.03262

    Examples:
      >>> rewards, mask = jnp.array([[0.0, 0.0, 0.0, 1.0]]), jnp.array([[1, 1, 0, 1]])
      >>> reinforce_plus_plus_advantages(rewards, mask, gamma=0.5, whitened=False).tolist()
      [[0.25, 0.5, 0.0, 1.0]]
    """
    check_shapes(rewards=rewards, mask=mask)
    mask = as_mask(mask)
    (rewards,) = as_floats(rewards)
    to_go = jax.lax.stop_gradient(rewards_to_go(zero_masked(rewards, mask), mask, gamma))
    return whiten(to_go, mask) if whitened else to_go


def reinforce_plus_plus_baseline_advantages(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    mask: Shaped[ArrayLike, "batch time"],
) -> Float[Array, "batch time"]:
    """REINFORCE++-baseline advantages: reward minus group mean, whitened over the batch.

    ``A_it = (R_i - mean_g - mean) / std``, with mean and std over all *tokens* of the batch, so
    that long responses have more weight in them. All groups share this scale, unlike in
    `grpo_advantages`: prompts that are nearly always solved are not weighted up.

    Pass the whole batch. An empty response is excluded from its group (in verl its reward
    is included in the mean). A group of one enters the whitening with 0 (in verl with its raw
    reward).

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt.
      mask: true on sampled tokens; holes are allowed, and empty responses are excluded.

    Returns:
      One advantage per token, 0 where the mask is false (gradient stopped).

    References:
      Hu et al., "REINFORCE++", 2025. https://arxiv.org/abs/2501.03262

    Examples:
      >>> mask = jnp.array([[1, 1], [1, 0]])
      >>> rewards, groups = jnp.array([1.0, 0.0]), jnp.array([0, 0])
      >>> result = reinforce_plus_plus_baseline_advantages(rewards, groups, mask)
      >>> [[round(x, 2) for x in row] for row in result.tolist()]
      [[0.58, 0.58], [-1.15, 0.0]]
    """
    mask = as_mask(mask)
    check_responses(rewards=rewards, groups=groups)
    check_rows("mask", mask, rewards=rewards)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    counted = isolate_uncounted(rewards, number_groups(groups), jnp.any(mask, axis=-1))
    advantages = dr_grpo_advantages(*counted)
    return whiten(jnp.broadcast_to(advantages[:, None], mask.shape), mask)


def remax_advantages(
    rewards: Real[ArrayLike, "*batch time"],
    greedy_rewards: Real[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch time"],
) -> Float[Array, "*batch time"]:
    """ReMax advantages: returns minus the reward of the greedy response to the same prompt.

    ``A_t = sum_{k >= t} r_k - R_greedy`` over the unmasked tokens. The greedy response costs one
    more generation per prompt and is not trained on.

    Args:
      rewards: one per token; usually zero except on the last sampled one.
      greedy_rewards: total reward of the greedy response, one per row.
      mask: true on sampled tokens; holes are allowed.

    Returns:
      One advantage per token, 0 where the mask is false (gradient stopped).

    References:
      Li et al., "ReMax: a simple, effective, and efficient reinforcement learning method for
      aligning large language models", 2024. https://arxiv.org/abs/2310.10505

    Examples:
      >>> rewards, greedy = jnp.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), jnp.array([0.25, 1.0])
      >>> remax_advantages(rewards, greedy, jnp.array([[1, 0, 1], [1, 1, 0]])).tolist()
      [[0.75, 0.0, 0.75], [-1.0, -1.0, 0.0]]
    """
    mask = as_mask(mask)
    check_shapes(rewards=rewards, mask=mask)
    rewards, greedy_rewards = as_floats(rewards, greedy_rewards)
    check_rows("rewards", rewards, greedy_rewards=greedy_rewards)
    to_go = rewards_to_go(zero_masked(rewards, mask), mask, 1.0)
    return jax.lax.stop_gradient(zero_masked(to_go - greedy_rewards[..., None], mask))


def optimal_token_baseline(
    rewards: Real[ArrayLike, "batch time"],
    groups: Integer[ArrayLike, "batch"],
    logprobs: Float[ArrayLike, "batch time"],
    sum_squared_probs: Float[ArrayLike, "batch time"],
    mask: Shaped[ArrayLike, "batch time"],
    *,
    importance_weights: Float[ArrayLike, "batch time"] | None = None,
    epsilon: Number = 0.0,
    lone_tail: bool = False,
) -> Float[Array, "batch time"]:
    """Optimal token baseline (OTB): returns minus the minimum-variance baseline of each position.

        w_t = (1 - 2 pi_t + sum_v pi_v^2) rho_t^2,    W_t = sum_{j <= t} w_j
        B_t = sum_i W_it G_it / (sum_i W_it + epsilon),    A_it = G_it - B_t

    ``w_t`` is the squared norm of the score function with respect to the logits, times
    ``rho_t^2``; ``W_t`` accumulates it over the response up to t. Sums run over the responses of
    the group that have a t-th token. Positions are counted in *unmasked* tokens, so holes and left
    padding do not shift them (verl's single-turn form counts columns).

    Args:
      rewards: one per token; usually zero except on the last sampled one.
      groups: one integer per response, equal for those that share a prompt.
      logprobs: of the sampled tokens under the trained policy, in nats.
      sum_squared_probs: ``sum_v pi_v^2`` over the vocabulary at each token, in (0, 1].
      mask: true on sampled tokens; holes are allowed.
      importance_weights: rho, trainer over sampler, per token; None is 1.
      epsilon: added to the sum of the weights; verl has 1e-8.
      lone_tail: applies to positions that only one response of the group reaches, and to groups of
        one. False makes the response its own baseline, so its advantage is 0 up to rounding. True
        sets the baseline to 0, as an option of verl does.

    Returns:
      One advantage per token, 0 where the mask is false (gradient stopped).

    References:
      verl, "optimal token baseline". https://github.com/verl-project/verl

    Examples:
      >>> rewards, mask = jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.ones((2, 2))
      >>> logprobs, squares = jnp.log(jnp.full((2, 2), 0.5)), jnp.full((2, 2), 0.5)
      >>> optimal_token_baseline(rewards, jnp.array([0, 0]), logprobs, squares, mask).tolist()
      [[0.5, 0.5], [-0.5, -0.5]]
    """
    arrays = {"logprobs": logprobs, "sum_squared_probs": sum_squared_probs, "mask": mask}
    check_shapes(rewards=rewards, **arrays)
    mask = as_mask(mask)
    weights = 1.0 if importance_weights is None else importance_weights
    floats = as_floats(*jax.lax.stop_gradient((rewards, logprobs, sum_squared_probs, weights)))
    rewards, logprobs, squares = (zero_masked(x, mask) for x in floats[:3])
    weights = zero_masked(broadcast("importance_weights", floats[3], rewards), mask)
    check_responses(groups=groups)
    check_rows("rewards", rewards, groups=groups)
    epsilon = settings.epsilon("epsilon", epsilon)

    to_go = rewards_to_go(rewards, mask, 1.0)
    moved = zero_masked((1 - 2 * jnp.exp(logprobs) + squares) * weights**2, mask)
    path = zero_masked(jnp.cumsum(moved, -1), mask)
    time = rewards.shape[-1]
    position = jnp.maximum(jnp.cumsum(mask, -1, dtype=jnp.int32) - 1, 0)
    cell = number_groups(groups)[:, None].astype(position.dtype) * time + position

    def over_responses(x: Float[Array, "batch time"]) -> Float[Array, "batch time"]:
        return jax.ops.segment_sum(x.ravel(), cell.ravel(), num_segments=x.size)[cell]

    baseline = ratio_or_zero(over_responses(path * to_go), over_responses(path) + epsilon)
    if lone_tail:
        present = over_responses(mask.astype(rewards.dtype))
        baseline = jnp.where(present > 1, baseline, 0)
    return zero_masked(to_go - baseline, mask)
