"""Which stage of a pipeline runs which micro-batch when, in plain arithmetic.

The layers are cut into ``stages x rounds`` chunks of equal depth, and chunk ``c`` lies on stage
``c % stages``: a micro-batch goes around the stages ``rounds`` times. Time is cut into ticks. In a
tick every stage runs at most one chunk forward and one chunk backward, then hands activations to
the next stage and gradients to the one before.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What a stage does in a tick: numbers, or traced scalars.

    Attributes:
      micro: which micro-batch, from 0.
      round: which of the chunks of this stage, from 0.
      active: whether there is anything to do; where not, the others mean nothing.
    """

    micro: Any
    round: Any
    active: Any


@dataclass(frozen=True)
class Schedule:
    """One forward, one backward (1F1B), with several rounds interleaved.

    With ``n(m, j) = (m // stages) stages rounds + j stages + m % stages``, stage ``s`` runs
    micro-batch ``m`` in round ``j`` forward at tick ``n(m, j) + s`` and backward at tick
    ``rounds stages - 1 + n(m, rounds - 1 - j) + (stages - 1 - s)``. The first ticks go forward only
    and the last ones backward only.

    Args:
      stages: devices along the pipeline.
      num_micro: micro-batches. With several rounds, a number that `stages` does not divide
        leaves gaps, which `bubble` counts.
      rounds: chunks of each stage (virtual stages).

    References:
      Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
      section 2.2. https://arxiv.org/abs/2104.04473
    """

    stages: int
    num_micro: int
    rounds: int = 1

    def __post_init__(self):
        for name in ("stages", "num_micro", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    def place(self, micro: Any, round: Any) -> Any:
        """``n(m, j)``: the order in which every stage goes forward."""
        group, rest = micro // self.stages, micro % self.stages
        return group * self.stages * self.rounds + round * self.stages + rest

    def slot(self, work: Work) -> Any:
        """Where the input of a chunk is kept, below `kept`."""
        return self.place(work.micro, work.round) % self.kept

    def forward(self, tick: Any, stage: Any) -> Work:
        """What `stage` runs forward at `tick`."""
        return self._at_place(tick - stage)

    def backward(self, tick: Any, stage: Any) -> Work:
        """What `stage` runs backward at `tick`."""
        work = self._at_place(tick - self.warmup - (self.stages - 1 - stage))
        return work._replace(round=self.rounds - 1 - work.round)

    def _at_place(self, place: Any) -> Work:
        group, rest = place // (self.stages * self.rounds), place % (self.stages * self.rounds)
        micro = group * self.stages + rest % self.stages
        return Work(micro, rest // self.stages, (place >= 0) & (micro < self.num_micro))

    @property
    def warmup(self) -> int:
        """Ticks before the first chunk goes backward."""
        return self.stages * self.rounds - 1

    @property
    def forward_ticks(self) -> int:
        """Ticks in which some stage goes forward; as many in which some stage goes backward."""
        return self.place(self.num_micro - 1, self.rounds - 1) + self.stages

    @property
    def ticks(self) -> int:
        """Ticks of a whole mini-batch."""
        return self.warmup + self.forward_ticks

    @property
    def bubble(self) -> float:
        """Idle time over working time of a stage, in lockstep.

        ``(stages - 1) / (num_micro rounds)`` when `stages` divides `num_micro` or there is one
        round.
        """
        return self.forward_ticks / (self.num_micro * self.rounds) - 1

    @property
    def kept(self) -> int:
        """Inputs of chunks that a stage keeps until they go backward: at most ``2 stages rounds -
        1``, however many micro-batches there are.

        A message takes a tick each way, hence about twice what 1F1B keeps where messages take no
        time.
        """
        return min(2 * self.stages * self.rounds - 1, self.forward_ticks - self.stages + 1)
