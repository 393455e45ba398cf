"""All randomness of a run comes from its seed, and what it is for."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import numpy as np

Purpose = Literal["weights", "critic", "rollout", "adapters"]


@dataclass(frozen=True)
class Randomness:
    """Keys made anew from the seed, so that a run has no state of randomness to save."""

    seed: int

    def key(self, purpose: Purpose) -> jax.Array:
        """Randomness for one purpose; no two purposes share any. What is sampled in a rollout is
        told apart by the numbers of prompts, samples and tokens."""
        # By its place in `Purpose`: moved there, it would draw anew under an old seed.
        return jax.random.fold_in(jax.random.key(self.seed), get_args(Purpose).index(purpose))

    def shuffler(self, step: int, epoch: int) -> np.random.Generator:
        """Randomness of the order of rows."""
        return np.random.default_rng([self.seed, step, epoch])
