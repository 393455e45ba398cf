"""Advantages from a critic: temporal-difference errors, discounted along the response."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Real, Shaped

from jrl.losses.advantages.critic.recursion import discounted_errors
from jrl.losses.arrays import (
    Scalar,
    as_floats,
    as_mask,
    broadcast,
    broadcastable,
    check_shapes,
    zero_masked,
    zero_per_row,
)
from jrl.losses.settings import discount


def gae(
    rewards: Real[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    lam: Scalar | Float[ArrayLike, "*#batch #time"] = 0.95,
    bootstrap_value: Scalar | Float[ArrayLike, "*#batch"] | None = None,
    terminated: Shaped[ArrayLike, "*#batch"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch time"], Float[Array, "*batch time"]]:
    """Generalised advantage estimation over the tokens that the policy sampled.

    With t+1 the *next token whose mask is true*, however far away it is,

        delta_t = r_t + gamma_t V_{t+1} - V_t
        A_t     = delta_t + gamma_t lam_t A_{t+1}
        G_t     = A_t + V_t

    and, after the last such token, ``A = 0`` and V is 0 where the response ended there and
    `bootstrap_value` where it was only cut short. This is the estimate
    on the compressed sequence: a hole in the mask (a tool's answer, another speaker) makes no
    temporal-difference error and costs no factor of lam.

    **A reward must lie on a token whose mask is true.** Like everything under a false mask, a
    reward elsewhere is never read. Where a response ends in masked tokens, the terminal reward
    therefore belongs on the last *sampled* token and not in the last column.

    **Several sequences packed in one row** are cut apart by ``gamma=0`` on the last sampled token
    of each: that token then sees neither the value nor the advantage that follow.

    What libraries differ in is the hole: verl and NeMo-RL skip it as here, OpenRLHF and older forks
    of verl take the value there for 0, which makes two errors. Advantages are not whitened here
    (verl and OpenRLHF do it in the same function); `whiten` does it.

    Args:
      rewards: one per token; usually zero but for the last sampled one.
      values: the critic's estimate of the state before each token.
      mask: true on sampled tokens; holes are legal.
      gamma: the discount, in [0, 1]; a scalar, or an array with as many axes as `rewards` such as
        ``gamma[:, None]`` for one per row. It belongs to the step from its token to the next.
      lam: how far to trust rewards (1) over values (0); of the same shapes as `gamma`.
      bootstrap_value: the value of the state after the last sampled token, one per row, for
        responses that were cut short. None for responses that ended, whose value is then 0.
      terminated: one per row; true where the response ended, so that the value after it is 0
        whatever `bootstrap_value` holds, false where it was truncated and `bootstrap_value`
        counts. None lets `bootstrap_value` count everywhere.
      implementation: "scan" goes token by token. "blocked" gives the same up to rounding and is
        faster on long rows, most of all where ``gamma lam`` is one number and the mask has no
        holes. None takes "blocked" from 256 tokens on.

    Returns:
      `(advantages, returns)`, both 0 where the mask is false and both without a gradient. A row
      without a true token is all 0.

    Raises:
      ValueError: if `terminated` is given without `bootstrap_value`, the implementation is unknown,
        or shapes do not fit.

    References:
      Schulman et al., "High-dimensional continuous control using generalized advantage
      estimation", 2016, eq. 16. https://arxiv.org/abs/1506.02438

    Examples:
      >>> import jax.numpy as jnp
      >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.75])
      >>> advantages, returns = gae(rewards, values, jnp.ones(3), lam=1.0)
      >>> advantages.tolist(), returns.tolist()
      ([0.5, 0.75, 0.25], [1.0, 1.0, 1.0])
    """
    gamma, lam = discount("gamma", gamma), discount("lam", lam)
    check_shapes(rewards=rewards, values=values, mask=mask)
    if terminated is not None and bootstrap_value is None:
        raise ValueError(
            "terminated is given without bootstrap_value: without the value after truncated "
            "responses every response counts as ended; give both, or neither."
        )
    mask = as_mask(mask)
    rewards, values = as_floats(rewards, values)
    gamma, lam = broadcastable("gamma", gamma, values), broadcastable("lam", lam, values)
    ended = zero_per_row(values)
    last = (
        ended if bootstrap_value is None else broadcast("bootstrap_value", bootstrap_value, ended)
    )
    if terminated is not None:
        last = jnp.where(broadcast("terminated", as_mask(terminated), ended) != 0, ended, last)

    advantages = discounted_errors(rewards, values, mask, gamma, lam, last, implementation)
    advantages = jax.lax.stop_gradient(advantages)
    return advantages, jax.lax.stop_gradient(zero_masked(advantages + values, mask))
