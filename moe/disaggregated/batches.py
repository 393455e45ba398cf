"""Assignment of sequences to micro-batches, balanced by predicted attention time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe.config import ModelConfig


@dataclass(frozen=True)
class Predicted:
    """Predicted time of attention for a sequence, in any unit.

    A sequence takes ``of_token + of_cached context``: its projections, and its cached keys and
    values.

    Raises:
      ValueError: for a time below 0.
    """

    of_token: float
    of_cached: float

    def __post_init__(self):
        if self.of_token < 0 or self.of_cached < 0:
            raise ValueError(
                f"of_token={self.of_token} and of_cached={self.of_cached} must not be below 0."
            )

    @classmethod
    def of(cls, config: ModelConfig) -> "Predicted":
        """Predicts from the multiplications of one layer: four projections, and two products with
        the cache."""
        heads = config.num_heads * config.head_dim
        both = heads + config.num_kv_heads * config.head_dim
        return cls(of_token=2.0 * config.d_model * both, of_cached=2.0 * heads)

    def of_batch(self, contexts: Sequence[int]) -> float:
        """Predicted time of a batch, from the cached tokens of its sequences."""
        return len(contexts) * self.of_token + self.of_cached * sum(contexts)


def lightest(times: Sequence[float], room: Sequence[int]) -> int:
    """Index of the batch that the next sequence joins: the one with the least predicted time among
    those with a free slot, the first of equals.

    The longest ends at most one sequence after the mean of the others (Graham, "Bounds for certain
    multiprocessing anomalies", 1966).

    Args:
      times: predicted time of each batch.
      room: number of free slots of each.

    Raises:
      ValueError: where no batch has a free slot.
    """
    free = np.asarray(room) > 0
    if not free.any():
        raise ValueError(f"none of {len(room)} batches has a free slot.")
    return int(np.argmin(np.where(free, times, np.inf)))
