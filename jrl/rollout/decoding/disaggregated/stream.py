"""The engine that rows of any kind share, with attention and experts on devices of their own."""

from collections.abc import Sequence

from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.rollout.decoding.disaggregated.engine import DisaggregatedEngine
from jrl.rollout.decoding.stream import StreamEngine
from moe.disaggregated.sides import SplitWeights
from moe.weights import Transformer


class DisaggregatedStreamEngine(StreamEngine, DisaggregatedEngine):
    """`StreamEngine` on two groups of devices: who comes, goes and is drawn in which way is its
    affair, and who computes the network that of `DisaggregatedEngine`, whose arguments it has.

    Each prompt runs in a row of its own, and a step computes all slots: their rows are the messages
    of micro-batches, which have one size. Experts stay where they were found to have equally much
    to do when nothing is under way, and loads fade.
    """

    _restarts = False  # requests come at any time: what was seen of those before says most

    @property
    def _row_widths(self) -> Sequence[int]:
        return ()  # prompts that share rows are a program of one mesh

    @property
    def step_sizes(self) -> list[int]:
        return [self._seating.per_rank]

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        super().load(weights, version, entropy)
        self._sides.of(weights)
        # Both sides have it, and nobody reads the whole again: its memory is given up.
        self._weights = None

    def _both_sides(self) -> SplitWeights[Array]:
        return self._sides.held
