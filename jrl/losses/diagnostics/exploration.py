"""Exploration: diagnostics of the diversity of outcomes among the responses to one prompt."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Integer, Shaped

from jrl.losses.groups import check_groups, group_max, group_min, group_sum


class GroupDegeneracy(NamedTuple):
    """Shares of the groups; every group counts once, whatever its size.

    Attributes:
      all_right: groups in which every response is right.
      all_wrong: groups in which none is.
      pass_at_1: the chance that one response is right.
      pass_at_k: groups in which at least one is right, k being the size of each group.
      gap: ``pass_at_k - pass_at_1``.
    """

    all_right: Float[Array, ""]
    all_wrong: Float[Array, ""]
    pass_at_1: Float[Array, ""]
    pass_at_k: Float[Array, ""]
    gap: Float[Array, ""]


def group_degeneracy(
    correct: Shaped[ArrayLike, "batch"], groups: Integer[ArrayLike, "batch"]
) -> GroupDegeneracy:
    """How many prompts give nothing to choose from, and how much trying again would help.

    **Concern**: exploration (2505.17997).

    **Reading it.** Groups all right or all wrong have no group-relative advantage; together they
    are the share of sampling that GRPO wastes and dynamic sampling filters. All right that grows is
    success; all wrong that does not shrink is what exploration does not reach. A gap that closes
    because pass@1 rises is learning; one that closes because pass@k stands still is sharpening: the
    policy only learns to pick what it could do before.

    Args:
      correct: whether each response is right, bool or 0/1; not the shaped reward.
      groups: one integer per response, equal for those that share a prompt.

    Returns:
      A `GroupDegeneracy`.

    Raises:
      ValueError: if shapes do not agree.

    References:
      Yu et al., "DAPO", 2025, section 3.2. https://arxiv.org/abs/2503.14476

    Examples:
      >>> import jax.numpy as jnp
      >>> correct, groups = jnp.array([1, 1, 0, 1, 0, 0]), jnp.array([4, 4, 7, 7, 9, 9])
      >>> found = group_degeneracy(correct, groups)
      >>> round(float(found.pass_at_1), 3), round(float(found.pass_at_k), 3)
      (0.5, 0.667)
    """
    correct, index = check_groups(groups, correct=correct)
    # Each response stands for its part of a group, so that sums over rows count groups.
    part = 1 / group_sum(jnp.ones_like(correct), index)
    part = part / jnp.sum(part)
    best, worst = group_max(correct, index), group_min(correct, index)

    def share(x: Float[Array, "batch"]) -> Float[Array, ""]:
        return jnp.sum(part * x)

    pass_at_1, pass_at_k = share(correct), share(best)
    return GroupDegeneracy(
        all_right=share(worst),
        all_wrong=share(1 - best),
        pass_at_1=pass_at_1,
        pass_at_k=pass_at_k,
        gap=pass_at_k - pass_at_1,
    )
