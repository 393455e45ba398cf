"""Advantage estimators: how much better an action was than expected.

None of them lets a gradient through: an advantage is a fact about the rollout. Nothing is whitened
unless `whiten` is called.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Integer, Real, Shaped

from jrl.losses.arrays import Number, Scalar, as_floats, as_mask, check_shapes, keep, spread
from jrl.losses.groups import group_min, group_sum, number_groups


def gae(
    rewards: Real[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    lam: Scalar | Float[ArrayLike, "*#batch #time"] = 0.95,
    bootstrap_value: Scalar | Float[ArrayLike, "*#batch"] | None = None,
) -> tuple[Float[Array, "*batch time"], Float[Array, "*batch time"]]:
    """Generalised advantage estimation over the tokens that the policy sampled.

    With t+1 the *next token whose mask is true*, however far away it is,

        delta_t = r_t + gamma_t V_{t+1} - V_t
        A_t     = delta_t + gamma_t lam_t A_{t+1}
        G_t     = A_t + V_t

    and, after the last such token, ``V = bootstrap_value`` and ``A = 0``. This is the estimate
    on the compressed sequence: a hole in the mask (a tool's answer, another speaker) makes no
    temporal-difference error and costs no factor of lam.

    **A reward must lie on a token whose mask is true.** Like everything under a false mask, a
    reward elsewhere is never read. Where a response ends in masked tokens, the terminal reward
    therefore belongs on the last *sampled* token and not in the last column.

    VAPO and VC-PPO call this twice: with ``lam=1`` for the returns that the critic learns, and
    with a smaller lam, such as that of `length_adaptive_lambda`, for the advantages of the policy.

    Args:
      rewards: one per token; usually zero but for the last sampled one.
      values: the critic's estimate of the state before each token.
      mask: true on sampled tokens; holes are legal.
      gamma: the discount, in [0, 1]; a scalar, or an array with as many axes as `rewards` such as
        ``gamma[:, None]`` for one per row. It belongs to the step from its token to the next.
      lam: how far to trust rewards (1) over values (0); of the same shapes as `gamma`.
      bootstrap_value: the value of the state after the last sampled token, one per row, for
        responses that were cut short. None for responses that ended, whose value is then 0.

    Returns:
      `(advantages, returns)`, both 0 where the mask is false and both without a gradient. A row
      without a true token is all 0.

    References:
      Schulman et al., "High-dimensional continuous control using generalized advantage
      estimation", 2016, eq. 16. https://arxiv.org/abs/1506.02438
      Yuan et al., "VC-PPO", 2025 (decoupled lam). https://arxiv.org/abs/2503.01491

    >>> import jax.numpy as jnp
    >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.75])
    >>> advantages, returns = gae(rewards, values, jnp.ones(3), lam=1.0)
    >>> advantages.tolist(), returns.tolist()
    ([0.5, 0.75, 0.25], [1.0, 1.0, 1.0])
    """
    check_shapes(rewards=rewards, values=values, mask=mask)
    mask = as_mask(mask)
    rewards, values = as_floats(rewards, values)
    rewards, values = keep(rewards, mask), keep(values, mask)
    gamma = spread("gamma", gamma, values)
    lam = spread("lam", lam, values)
    ended = jnp.zeros_like(values[..., 0])
    last = ended if bootstrap_value is None else spread("bootstrap_value", bootstrap_value, ended)

    advantages = _discounted_errors(rewards, values, mask, gamma, lam, last)
    advantages = jax.lax.stop_gradient(keep(advantages, mask))
    return advantages, jax.lax.stop_gradient(keep(advantages + values, mask))


def _discounted_errors(
    rewards: Float[Array, "*batch time"],
    values: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
    gamma: Float[Array, "*batch time"],
    lam: Float[Array, "*batch time"],
    last_value: Float[Array, "*batch"],
) -> Float[Array, "*batch time"]:
    """The recursion of `gae`, from last token to first; under a false mask, what was carried."""

    def step(following, token):
        advantage, value = following
        reward, value_here, counts, discount, decay = token
        error = reward + discount * value - value_here
        here = (error + discount * decay * advantage, value_here)
        following = jax.tree.map(lambda new, old: jnp.where(counts, new, old), here, following)
        return following, following[0]

    by_time = [jnp.moveaxis(x, -1, 0) for x in (rewards, values, mask, gamma, lam)]
    # Made from the rows so that, under `jax.shard_map`, the carry varies over the devices they do.
    nothing = jnp.zeros_like((rewards + values)[..., 0])
    start = (nothing, nothing + last_value)
    _, advantages = jax.lax.scan(step, start, tuple(by_time), reverse=True)
    return jnp.moveaxis(advantages, 0, -1)


def length_adaptive_lambda(
    lengths: Real[ArrayLike, "*batch"], *, alpha: Number = 0.05, floor: Number = 0.0
) -> Float[Array, "*batch"]:
    """VAPO's lam for a response of each length.

    ``lam(l) = max(1 - 1 / (alpha l), floor)``, so that the geometric weights of the
    temporal-difference errors sum to ``alpha l``. The weight of the terminal error on the first
    token tends to ``exp(-1 / alpha)`` whatever the length: the reach is a fixed *share* of the
    response, about 23 % of it (down to a weight of 1 %) with ``alpha = 0.05``.

    The expression is negative for ``alpha l < 1``. The floor decides what short responses get: 0,
    the default, is one-step TD (the form of NeMo-RL); 0.95 lets lam adapt only beyond 400 tokens
    (the form of verl's T-PPO).

    Args:
      lengths: sampled tokens per row, ``mask.sum(-1)``; 0 gives the floor.
      alpha: the share of a response that the errors reach, positive.
      floor: the least lam, in [0, 1].

    Returns:
      One lam per row. Pass it on as ``gae(..., lam=lam[:, None])``.

    Raises:
      ValueError: if `alpha` is not positive or `floor` is outside [0, 1].

    References:
      Yue et al., "VAPO", 2025, section 4.2. https://arxiv.org/abs/2504.05118

    >>> import jax.numpy as jnp
    >>> length_adaptive_lambda(jnp.array([10, 40, 100]), alpha=0.05).round(3).tolist()
    [0.0, 0.5, 0.800000011920929]
    """
    if alpha <= 0:
        raise ValueError(f"alpha={alpha} must be positive: VAPO uses 0.05, later work 0.4 to 1.5.")
    if not 0 <= floor <= 1:
        raise ValueError(f"floor={floor} must lie in [0, 1], as every lam does.")
    (lengths,) = as_floats(jax.lax.stop_gradient(lengths))
    return jnp.maximum(1 - 1 / (alpha * lengths), floor)


def grpo(
    rewards: Real[ArrayLike, "batch"],
    groups: Integer[ArrayLike, "batch"],
    *,
    scale: Literal["group"] | None = "group",
    epsilon: Number = 1e-6,
) -> Float[Array, "batch"]:
    """Group-relative advantages: each response against the others that answer the same prompt.

    ``A_i = (R_i - mean_g) / (std_g + epsilon)``, with the *unbiased* standard deviation of the
    group. A constant added to the rewards of a group changes nothing.

    A group without variance gets exactly 0: rewards are taken relative to the least of their group
    before anything is averaged, so that rounding cannot be blown up by ``1 / epsilon``. The same
    holds for a group of one, which has nothing to be compared with (verl hands such a row its raw
    reward instead). A row that only fills up a batch disturbs no other if its group is its own.

    Args:
      rewards: one per response.
      groups: one integer per response, equal for those that share a prompt; any integers, in any
        order.
      scale: "group" divides by the standard deviation of the group; None does not, which is the
        advantage of Dr. GRPO and keeps easy and hard prompts from being weighted up.
      epsilon: added to the standard deviation.

    Returns:
      One advantage per response, without a gradient. All tokens of a response share it:
      ``ppo_loss(logprobs, old_logprobs, advantages[:, None], mask)``.

    References:
      Shao et al., "DeepSeekMath", 2024, section 4.1.2. https://arxiv.org/abs/2402.03300
      Liu et al., "Understanding R1-Zero-like training", 2025. https://arxiv.org/abs/2503.20783

    >>> import jax.numpy as jnp
    >>> grpo(jnp.array([1.0, 5.0, 0.0]), jnp.array([7, 2, 7]), scale=None).tolist()
    [0.5, 0.0, -0.5]
    """
    check_shapes(rewards=rewards, groups=groups)
    (rewards,) = as_floats(jax.lax.stop_gradient(rewards))
    index = number_groups(groups)
    size = group_sum(jnp.ones_like(rewards), index)
    above_least = rewards - group_min(rewards, index)
    advantages = above_least - group_sum(above_least, index) / size
    if scale is None:
        return advantages
    variance = group_sum(advantages**2, index) / jnp.maximum(size - 1, 1)
    return advantages / (jnp.sqrt(variance) + epsilon)


def whiten(
    x: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    unbiased: bool = True,
    keep_mean: bool = False,
    epsilon: Number = 1e-8,
) -> Float[Array, "*batch time"]:
    """Scale to unit variance, and shift to zero mean, over the true tokens of the whole batch.

    ``(x - mean) / sqrt(variance + epsilon)``. No estimator or loss here does it by itself: it
    makes the advantage of a token depend on which other responses are in the batch. The statistics
    are those of the array that is passed, so pass the whole batch, not a micro-batch or one
    device's part of it.

    Args:
      x: usually advantages.
      mask: true on the tokens that count.
      unbiased: divide the squares by ``n - 1`` (as verl does) rather than ``n`` (as OpenRLHF does).
      keep_mean: add the mean back, so that only the scale changes.
      epsilon: added to the variance, inside the root.

    Returns:
      The whitened tokens, 0 where the mask is false, without a gradient. A single token has no
      variance: it becomes 0 (or stays what it is, with `keep_mean`).

    >>> import jax.numpy as jnp
    >>> whiten(jnp.array([1.0, 3.0, 9.0]), jnp.array([1, 1, 0]), unbiased=False).tolist()
    [-1.0, 1.0, 0.0]
    """
    check_shapes(x=x, mask=mask)
    mask = as_mask(mask)
    (x,) = as_floats(jax.lax.stop_gradient(x))
    x = keep(x, mask)
    count = jnp.sum(mask, dtype=jnp.int32).astype(x.dtype)
    mean = jnp.sum(x) / jnp.maximum(count, 1)
    centred = keep(x - mean, mask)
    variance = jnp.sum(centred**2) / jnp.maximum(count - 1 if unbiased else count, 1)
    scaled = centred * jax.lax.rsqrt(variance + epsilon)
    return keep(scaled + mean, mask) if keep_mean else scaled
