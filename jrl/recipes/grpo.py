"""GRPO: no critic, each completion against the others of its prompt.

References:
  Shao et al., "DeepSeekMath", 2024, eq. 3 and section 4.2. https://arxiv.org/abs/2402.03300
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.losses import grpo_advantages
from jrl.recipes.batch import Experience
from jrl.recipes.recipe import Recipe


@dataclass(frozen=True)
class Grpo(Recipe):
    """GRPO with the token mean; the defaults fit a laptop."""

    scale_by_std: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards."""

    def __post_init__(self):
        super().__post_init__()
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} leaves nothing to compare a completion with: "
                "choose at least 2."
            )

    def advantages(self, experience: Experience[Array]) -> tuple[Float[Array, "batch time"], None]:
        return group_advantages(experience, scale_by_std=self.scale_by_std), None


def group_advantages(
    experience: Experience[Array], *, scale_by_std: bool = True
) -> Float[Array, "batch time"]:
    """The group-relative advantage of each completion, on each of its tokens."""
    per_row = grpo_advantages(
        experience.rewards, experience.groups, scale="group" if scale_by_std else None
    )
    return jnp.where(experience.mask, per_row[:, None], 0.0)


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
