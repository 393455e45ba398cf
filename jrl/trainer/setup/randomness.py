"""RNG keys of a run, derived from its seed and their purpose."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import numpy as np

Purpose = Literal["weights", "critic", "rollout", "adapters"]


@dataclass(frozen=True)
class Randomness:
    """RNG keys derived from the seed, so that a run has no RNG state to save."""

    seed: int

    def key(self, purpose: Purpose) -> jax.Array:
        """RNG key for one purpose; no two purposes share a key. Keys of rollout tokens are derived
        further from prompt, sample and position."""
        # By its index in `Purpose`: reordering that would change the keys of existing runs.
        return jax.random.fold_in(jax.random.key(self.seed), get_args(Purpose).index(purpose))

    def shuffler(self, step: int, epoch: int) -> np.random.Generator:
        """Random generator for the order of rows."""
        return np.random.default_rng([self.seed, step, epoch])
