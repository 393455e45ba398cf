"""All randomness of a run comes from its seed, and what it is for."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import numpy as np

Purpose = Literal["weights", "critic", "rollout", "evaluation", "warm start"]


@dataclass(frozen=True)
class Randomness:
    """Keys made anew from the seed, so that a run has no state of randomness to save."""

    seed: int

    def key(self, purpose: Purpose, step: int, round: int = 0) -> jax.Array:
        """Randomness for one purpose at one step; no two purposes share any."""
        key = jax.random.key(self.seed)
        for part in (get_args(Purpose).index(purpose), step, round):
            key = jax.random.fold_in(key, part)
        return key

    def shuffler(self, step: int, epoch: int) -> np.random.Generator:
        """Randomness of the order of rows."""
        return np.random.default_rng([self.seed, step, epoch])
