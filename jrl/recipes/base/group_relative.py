"""Recipes without a critic that compare the completions of a prompt with each other."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.losses import grpo_advantages
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
        """Advantage of each completion relative to those of its prompt."""
        return grpo_advantages(required(batch.rewards), required(batch.groups))

    def targets(self, batch: Batch[Array]) -> Targets[Array]:
        advantages = self.row_advantages(batch)
        # The same on every token: without a critic there is no credit assignment to single tokens.
        return Targets(jnp.where(batch.mask, advantages[:, None], 0.0))
