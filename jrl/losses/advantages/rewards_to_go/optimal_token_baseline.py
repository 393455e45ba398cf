"""The rewards to come against the baseline with the least variance, position by position."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real, Shaped

from jrl.losses import settings
from jrl.losses.advantages.rewards_to_go.discounted import rewards_to_go
from jrl.losses.arrays import (
    Number,
    as_floats,
    as_mask,
    broadcast,
    check_responses,
    check_rows,
    check_shapes,
    zero_masked,
)
from jrl.losses.groups import number_groups, ratio_or_zero


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
    """Rewards to come, against the baseline with the least variance for each position of a group.

        w_t = (1 - 2 pi_t + sum_v pi_v^2) rho_t^2,    W_t = sum_{j <= t} w_j
        B_t = sum_i W_it G_it / (sum_i W_it + epsilon),    A_it = G_it - B_t

    ``w_t`` is the squared norm of the score function in the logits, so W says how much a response
    has moved the policy up to t. Sums run over the responses of the group that have a t-th token;
    positions count *true* tokens, so holes and padding on the left shift nothing (verl's form for
    single turns counts columns).

    Args:
      rewards: one per token; usually zero but for the last sampled one.
      groups: one integer per response, equal for those that share a prompt.
      logprobs: of the sampled tokens under the policy that is trained, in nats.
      sum_squared_probs: ``sum_v pi_v^2`` over the vocabulary at each token, in (0, 1].
      mask: true on sampled tokens; holes are legal.
      importance_weights: rho, trainer over sampler, per token; None is 1.
      epsilon: added to the sum of the weights; verl has 1e-8.
      lone_tail: where one response alone is that long, it is its own baseline and gets (but for a
        rounding) 0; True takes the baseline for 0 there, as an option of verl does. So does a
        group of one.

    Returns:
      One advantage per token, 0 where the mask is false and without a gradient.

    Raises:
      ValueError: if shapes do not fit.

    References:
      verl, "optimal token baseline". https://github.com/verl-project/verl

    Examples:
      >>> import jax.numpy as jnp
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
