"""GPG: groups that teach nothing are made up for."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Real

from jrl.losses import settings
from jrl.losses.arrays import Number
from jrl.losses.groups import check_groups, group_centred, group_max, group_min


def gpg_advantages(
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

    Examples:
      >>> import jax.numpy as jnp
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
    number = jnp.sum(counts, dtype=jnp.int32).astype(rewards.dtype)
    return advantages * (rewards.size / jnp.maximum(number, 1))
