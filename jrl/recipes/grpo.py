"""GRPO and its relatives: no critic; each completion is compared with the others of its prompt.

Dr. GRPO divides neither by a group's standard deviation nor by a response's length. RLOO's baseline
is the mean reward of the other completions of the prompt. MaxRL divides what is left of the reward
by the mean of the prompt. GSPO's ratio and clip apply to the whole response. CISPO's ratio is a
clipped weight whose gradient is stopped, so that every token keeps its gradient.

References:
  GRPO: Shao et al., "DeepSeekMath", 2024, eq. 3 and section 4.2. https://arxiv.org/abs/2402.03300
  Dr. GRPO: Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025.
  https://arxiv.org/abs/2503.20783
  RLOO: Ahmadian et al., "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from
  Human Feedback in LLMs", 2024, section 4. https://arxiv.org/abs/2402.14740
  MaxRL: Tajwar et al., "Maximum likelihood reinforcement learning", 2026.
  https://arxiv.org/abs/2602.02710
  GSPO: Zheng et al., "Group Sequence Policy Optimization", 2025, eqs. 5 to 7 and section 5.1.
  https://arxiv.org/abs/2507.18071
  CISPO: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
  2025, eqs. 4 and 5. https://arxiv.org/abs/2506.13585
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.losses import (
    Aggregation,
    cispo_loss,
    dr_grpo_advantages,
    grpo_advantages,
    gspo_loss,
    maxrl_advantages,
    rloo_advantages,
)
from jrl.recipes.base.batch import Batch, Targets, required
from jrl.recipes.base.recipe import Recipe


@dataclass(frozen=True)
class GroupRelative(Recipe):
    """One advantage per completion, on each of its tokens; by default GRPO's."""

    def __post_init__(self):
        super().__post_init__()
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} leaves nothing to compare a completion with: "
                "choose at least 2."
            )

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        """Advantage of each completion relative to the others of its prompt."""
        return grpo_advantages(required(batch.rewards), required(batch.groups))

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        advantages = self.row_advantages(batch)
        # The same on every token: only a critic would assign credit to single tokens.
        return Targets(jnp.where(batch.mask, advantages[:, None], 0.0))


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

    @classmethod
    def paper(cls) -> "Grpo":
        """The table of DeepSeekMath: 16 prompts x 64, one update, KL 0.04, mean per response."""
        return replace(
            cls(),
            prompts=16,
            group_size=64,
            mini_batch=1024,
            micro_batch=1024,
            learning_rate=1e-6,
            kl_coef=0.04,
            aggregation="seq-mean-token-mean",
        )


@dataclass(frozen=True)
class DrGrpo(GroupRelative):
    """Dr. GRPO; token losses are divided by the length limit, which is the same in each step."""

    # Divided by its own length, a long wrong response would cost less for each token.
    aggregation: Aggregation = "seq-mean-token-sum-norm"

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        return dr_grpo_advantages(required(batch.rewards), required(batch.groups))


@dataclass(frozen=True)
class Rloo(GroupRelative):
    """RLOO over tokens. In the first update of a step its gradient is REINFORCE's; in later
    ones the clipped ratio corrects for completions that are off-policy."""

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        # A baseline without the completion's own reward keeps the gradient unbiased.
        return rloo_advantages(required(batch.rewards), required(batch.groups))


@dataclass(frozen=True)
class Maxrl(GroupRelative):
    """MaxRL: a prompt that is seldom solved has a larger weight."""

    def __post_init__(self):
        super().__post_init__()
        if self.reward_wrong < 0 or self.reward_correct < 0:
            raise ValueError(
                f"reward_wrong={self.reward_wrong} and reward_correct={self.reward_correct}: MaxRL "
                "divides by the mean reward of a prompt, so rewards must not be negative."
            )

    def row_advantages(self, batch: Batch[Array]) -> Float[Array, "batch"]:
        return maxrl_advantages(required(batch.rewards), required(batch.groups))


@dataclass(frozen=True)
class Gspo(GroupRelative):
    """GSPO with the paper's bounds, which suit responses of thousands of tokens: the longer a
    response, the less the geometric mean of its tokens' ratios moves."""

    clip_low: float = 3e-4
    """How far the ratio of a response may fall below 1."""
    clip_high: float = 4e-4
    """How far it may rise above 1."""
    # The ratio is one number for a response, and so is its weight in the mean.
    aggregation: Aggregation = "seq-mean-token-mean"

    policy_loss = staticmethod(gspo_loss)


@dataclass(frozen=True)
class Cispo(GroupRelative):
    """CISPO with an upper bound only, as in the paper; the value of the bound is verl's."""

    clip_low: float = 1.0
    """How far the weight may fall below 1; 1 means no bound."""
    clip_high: float = 0.2
    """How far the weight may rise above 1."""

    policy_loss = staticmethod(cispo_loss)

    @property
    def policy_loss_settings(self) -> dict[str, Any]:
        # No `clip_dual`: the bound on the weight holds at advantages of either sign.
        return {"clip_low": self.clip_low, "clip_high": self.clip_high}
