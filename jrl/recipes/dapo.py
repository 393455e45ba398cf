"""DAPO: clip-higher, dynamic sampling, token-mean loss, soft overlong punishment.

References:
  Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025.
  https://arxiv.org/abs/2503.14476
"""

from dataclasses import dataclass, replace

from jaxtyping import Array, Float, Int

from jrl.losses import Aggregation, overlong_penalty
from jrl.recipes.base.hyperparameters import RecipeType
from jrl.recipes.grpo import GroupRelative


@dataclass(frozen=True)
class Dapo(GroupRelative):
    """DAPO; clipping, rewards and penalty as in the paper, sizes that fit a laptop."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    aggregation: Aggregation = "token-mean"
    reward_correct: float = 1.0
    reward_wrong: float = -1.0
    dynamic_sampling: bool = True

    overlong_buffer: int | None = None
    """Tokens below the length limit over which the penalty grows to 1; None is a fifth of the
    limit, the paper's share, and 0 is no penalty."""

    def rewards(
        self, scores: Float[Array, "batch"], lengths: Int[Array, "batch"], response_length: int
    ) -> Float[Array, "batch"]:
        # 4,096 of 20,480 tokens in the paper.
        buffer = response_length // 5 if self.overlong_buffer is None else self.overlong_buffer
        # Added to the reward, not to the score: dynamic sampling and accuracy use the verifier's
        # score, whatever the length.
        penalty = overlong_penalty(lengths, max_length=response_length, buffer=buffer)
        return super().rewards(scores, lengths, response_length) + penalty

    @classmethod
    def paper(cls: type[RecipeType]) -> RecipeType:
        """The paper's table: 512 prompts x 16, mini-batches of 512, lengths 16384 + 4096."""
        return replace(
            cls(),
            prompts=512,
            group_size=16,
            mini_batch=512,
            micro_batch=512,
            learning_rate=1e-6,
            learning_rate_warmup=20 * 16,  # 20 rollouts of 16 optimizer steps
            weight_decay=0.1,
            max_grad_norm=1.0,
            overlong_buffer=4096,
        )
