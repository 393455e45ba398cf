"""Serving engine with per-request sampling, with attention and experts on separate devices."""

from collections.abc import Sequence

from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.rollout.decoding.disaggregated.engine import DisaggregatedEngine
from jrl.rollout.decoding.stream import StreamEngine
from moe.disaggregated.weights import SplitWeights
from moe.weights import Transformer


class DisaggregatedStreamEngine(StreamEngine, DisaggregatedEngine):
    """`StreamEngine` on two groups of devices: `StreamEngine` admits, cancels and samples requests,
    `DisaggregatedEngine` computes the network. Arguments are those of the latter.

    Each prompt runs in a row of its own, and a step computes all slots, as micro-batches have a
    fixed size. The expert placement is kept when no row is in flight, and loads decay
    exponentially.
    """

    _restarts = False  # requests come at any time: earlier loads are the best prediction

    @property
    def _row_widths(self) -> Sequence[int]:
        return ()  # packed prefill is for one mesh only

    @property
    def step_sizes(self) -> list[int]:
        return [self._scheduler.per_rank]

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        super().load(weights, version, entropy)
        self._split_policy.sync(weights)
        # Both device groups have their weights: the memory of the full copy is freed.
        self._weights = None

    def _ensure_split_weights(self) -> SplitWeights[Array]:
        return self._split_policy.current
