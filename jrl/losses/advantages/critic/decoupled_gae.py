"""VC-PPO's and VAPO's GAE: one lam for the policy and another for the critic."""

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Real, Shaped

from jrl.losses.advantages.critic.gae import gae
from jrl.losses.arrays import (
    Scalar,
)
from jrl.losses.settings import discount


def decoupled_gae(
    rewards: Real[ArrayLike, "*batch time"],
    values: Float[ArrayLike, "*batch time"],
    mask: Shaped[ArrayLike, "*batch time"],
    *,
    gamma: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    lam_policy: Scalar | Float[ArrayLike, "*#batch #time"] = 0.95,
    lam_critic: Scalar | Float[ArrayLike, "*#batch #time"] = 1.0,
    bootstrap_value: Scalar | Float[ArrayLike, "*#batch"] | None = None,
    terminated: Shaped[ArrayLike, "*#batch"] | None = None,
) -> tuple[Float[Array, "*batch time"], Float[Array, "*batch time"]]:
    """Advantages with one lam and the critic's targets with another: VC-PPO and VAPO.

        A_t = sum_k (prod gamma lam_policy) delta_{t+k}
        G_t = sum_k (prod gamma lam_critic) delta_{t+k} + V_t

    With a lam below 1 the reward at the end reaches the first tokens of a long response with
    hardly any weight, so a critic that learns from such targets stays where it was initialised. It
    learns from undiscounted returns instead (``lam_critic=1``), while the policy keeps the lower
    variance of a smaller lam. The policy gradient has the same expectation under a perfect critic
    whatever the two are.

    Args:
      rewards: one per token; usually zero but for the last sampled one.
      values: the critic's estimate of the state before each token.
      mask: true on sampled tokens; holes are legal.
      gamma: the discount, in [0, 1]; a scalar or an array as for `gae`.
      lam_policy: the lam of the advantages; 0.95 in VC-PPO, in VAPO that of
        ``length_adaptive_lambda(mask.sum(-1))[:, None]``.
      lam_critic: the lam of the returns; 1 in both papers.
      bootstrap_value: the value after the last sampled token, one per row, as for `gae`.
      terminated: where `bootstrap_value` does not count, as for `gae`.

    Returns:
      `(advantages, returns)`, both 0 where the mask is false and both without a gradient. Unless
      the two lams are equal, the returns are not ``advantages + values``.

    Raises:
      ValueError: if `terminated` is given without `bootstrap_value`, or shapes do not fit.

    References:
      Yuan et al., "What's behind PPO's collapse in long-CoT? Value optimization holds the secret"
      (VC-PPO), 2025. https://arxiv.org/abs/2503.01491
      Yue et al., "VAPO", 2025. https://arxiv.org/abs/2504.05118

    Examples:
      >>> import jax.numpy as jnp
      >>> rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 0.25, 0.75])
      >>> advantages, returns = decoupled_gae(rewards, values, jnp.ones(3), lam_policy=0.0)
      >>> advantages.tolist(), returns.tolist()
      ([-0.25, 0.5, 0.25], [1.0, 1.0, 1.0])
    """
    lam_policy, lam_critic = discount("lam_policy", lam_policy), discount("lam_critic", lam_critic)

    def estimate(lam: Scalar | Float[ArrayLike, "*#batch #time"]):
        return gae(
            rewards,
            values,
            mask,
            gamma=gamma,
            lam=lam,
            bootstrap_value=bootstrap_value,
            terminated=terminated,
        )

    return estimate(lam_policy)[0], estimate(lam_critic)[1]
