"""GRPO: no critic; each completion is compared with the others of its prompt.

References:
  Shao et al., "DeepSeekMath", 2024, eq. 3 and section 4.2. https://arxiv.org/abs/2402.03300
"""

from dataclasses import dataclass, replace

from jaxtyping import Array, Float

from jrl.losses import grpo_advantages
from jrl.recipes.base.batch import Batch, required
from jrl.recipes.base.group_relative import GroupRelative


@dataclass(frozen=True)
class Grpo(GroupRelative):
    """GRPO with the token mean; the defaults fit a laptop."""

    scale_by_std: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards."""

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        # Without the scale, as in Dr. GRPO, groups that are nearly all correct or all wrong have
        # the same weight as others.
        scale = "group" if self.scale_by_std else None
        return grpo_advantages(required(batch.rewards), required(batch.groups), scale=scale)


def paper() -> Grpo:
    """The table of DeepSeekMath: 16 prompts x 64, one update, KL 0.04, mean per response."""
    return replace(
        Grpo(),
        prompts=16,
        group_size=64,
        mini_batch=1024,
        micro_batch=1024,
        learning_rate=1e-6,
        kl_coef=0.04,
        aggregation="seq-mean-token-mean",
    )
