"""Assignment of sequences to micro-batches, balanced by predicted attention time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe.config import ModelConfig


@dataclass(frozen=True)
class AttentionTime:
    """Predicted time of attention for a sequence, in any unit.

    A sequence takes ``per_token + per_cached_token context`` in a decode step.

    Attributes:
      per_token: time of the projections of its token.
      per_cached_token: time of reading the keys and values of one cached token.

    Raises:
      ValueError: for a time below 0.
    """

    per_token: float
    per_cached_token: float

    def __post_init__(self):
        if self.per_token < 0 or self.per_cached_token < 0:
            raise ValueError(
                f"per_token={self.per_token} and per_cached_token={self.per_cached_token} must not "
                "be negative."
            )

    @classmethod
    def from_config(cls, config: ModelConfig) -> "AttentionTime":
        """Prediction from the multiplications of one layer of grouped-query attention: four
        projections, and two products with the cache."""
        heads = config.num_heads * config.head_dim
        all_projections = heads + config.num_kv_heads * config.head_dim
        return cls(per_token=2.0 * config.d_model * all_projections, per_cached_token=2.0 * heads)

    def batch_time(self, contexts: Sequence[int]) -> float:
        """Predicted time of a batch, from the cached tokens of its sequences."""
        return len(contexts) * self.per_token + self.per_cached_token * sum(contexts)


def lightest_batch(times: Sequence[float], free_slots: Sequence[int]) -> int:
    """Index of the batch that the next sequence joins: the one with the least predicted time among
    those with a free slot, the first of equals.

    As long as all have a free slot, the times of batches that are filled so differ by no more than
    that of the longest sequence (Graham, "Bounds for certain multiprocessing anomalies", 1966).

    Args:
      times: predicted time of each batch.
      free_slots: number of free slots of each.

    Raises:
      ValueError: where no batch has a free slot.
    """
    has_free_slot = np.asarray(free_slots) > 0
    if not has_free_slot.any():
        raise ValueError(f"none of {len(free_slots)} batches has a free slot.")
    return int(np.argmin(np.where(has_free_slot, times, np.inf)))
