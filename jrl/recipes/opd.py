"""On-policy distillation: a teacher scores each token that the policy samples.

References:
  Agarwal et al., "On-policy distillation of language models", 2023.
  https://arxiv.org/abs/2306.13649
  Thinking Machines, "On-policy distillation", 2025.
  https://thinkingmachines.ai/blog/on-policy-distillation
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jrl.recipes.base.batch import Batch, Targets, required
from jrl.recipes.base.recipe import Recipe


@dataclass(frozen=True)
class Opd(Recipe):
    """On-policy distillation: a token's advantage is how much likelier it is under `teacher`."""

    # Rewards are only reported, so a group has nothing to compare, and different prompts show more.
    prompts: int = 128
    group_size: int = 4

    uses_rewards: ClassVar[bool] = False

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        # The trainer adds the term of the teacher.
        return Targets(jnp.zeros_like(required(batch.old_logprobs)))

    @classmethod
    def paper(cls) -> "Opd":
        """The table of the paper's published code: 1,024 prompts x 4, one update; the rate is for
        all weights (1e-4 for LoRA)."""
        return replace(
            cls(),
            prompts=1024,
            group_size=4,
            mini_batch=4096,
            micro_batch=4096,
            learning_rate=5e-5,
        )
