"""Ping-pong pipeline schedule of disaggregated decoding: the micro-batch that a sequence joins,
balanced by predicted attention time, and the order in which the host enqueues programs, layer by
layer, and within a layer micro-batch by micro-batch.

While one micro-batch is with the experts, attention computes another. Each device runs its programs
in the order in which they were enqueued, concurrently with other devices; no program waits for the
host. The programs of one side are in the order of (token, layer, micro-batch). Over both sides, the
attention of the next layer directly follows the experts. So if an exchange occupies both sides
(`moe.disaggregated.m2n.Collective`), attention of the other micro-batches is enqueued before the
messages that one of them waits for.

References:
  Zhu et al., "MegaScale-Infer", 2025, section 4.1, figure 4. https://arxiv.org/abs/2504.02263
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    those that have free slots, the first of equals.

    As long as all have a free slot, the times of batches that are filled so differ by no more than
    the time of the longest sequence (Graham, "Bounds for certain multiprocessing anomalies", 1966).

    Raises:
      ValueError: if no batch has a free slot.
    """
    has_free_slot = np.asarray(free_slots) > 0
    if not has_free_slot.any():
        raise ValueError(f"none of {len(free_slots)} batches has a free slot.")
    return int(np.argmin(np.where(has_free_slot, times, np.inf)))


Role = Literal["begin", "attention", "experts", "end"]


class Enqueued(NamedTuple):
    """Schedule entry: a program, with the exchange of its results.

    Attributes:
      role: "begin" embeds a token of each row and runs dense first layers; "attention" is the half
        of a layer before its experts, followed by the exchange of its rows; "experts" computes
        these, followed by the exchange of the sums; "end" computes logits and the next token.
      token: index of the token in each row, from the start of this decoding.
      layer: index among the layers with experts; 0 in "begin", the last in "end".
      micro_batch: index of the micro-batch.
    """

    role: Role
    token: int
    layer: int
    micro_batch: int


def order_programs(
    num_layers: int, micro_batches: int, should_continue: Callable[[int], bool]
) -> Iterator[Enqueued]:
    """Yields the schedule entries in order.

    Args:
      num_layers: number of layers with experts.
      should_continue: true if a token of that index is to be decoded; called once for each in
        order, before any of its programs is enqueued.
    """
    micro_batch_ids, token, last = range(micro_batches), 0, num_layers - 1
    if not should_continue(0):
        return
    for micro_batch in micro_batch_ids:
        yield Enqueued("begin", 0, 0, micro_batch)
        yield Enqueued("attention", 0, 0, micro_batch)
    continues = True
    while continues:
        for layer in range(num_layers):
            continues = should_continue(token + 1) if layer == last else continues
            for micro_batch in micro_batch_ids:
                yield Enqueued("experts", token, layer, micro_batch)
                if layer < last:
                    yield Enqueued("attention", token, layer + 1, micro_batch)
                    continue
                yield Enqueued("end", token, layer, micro_batch)
                if continues:
                    yield Enqueued("begin", token + 1, 0, micro_batch)
                    yield Enqueued("attention", token + 1, 0, micro_batch)
        token += 1
