"""Which stage of a pipeline runs which micro-batch when, in plain arithmetic.

The layers are cut into ``stages x num_chunks`` model chunks of equal depth, and model chunk ``c``
lies on stage ``c % stages``: a micro-batch goes around the stages ``num_chunks`` times. Time is cut
into ticks. In a tick every stage runs at most one chunk forward and one chunk backward, then hands
activations to the next stage and gradients to the one before.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What a stage does in a tick: numbers, or traced scalars.

    Attributes:
      micro_batch: which micro-batch, from 0.
      chunk: which of the model chunks of this stage, from 0.
      active: whether there is anything to do; where not, the others mean nothing.
    """

    micro_batch: Any
    chunk: Any
    active: Any


@dataclass(frozen=True)
class Schedule:
    """One forward, one backward (1F1B), interleaved where a stage has several model chunks.

    With ``n(m, j) = (m // stages) stages num_chunks + j stages + m % stages``, stage ``s`` runs
    micro-batch ``m`` through its chunk ``j`` forward at tick ``n(m, j) + s`` and backward at tick
    ``num_chunks stages - 1 + n(m, num_chunks - 1 - j) + (stages - 1 - s)``. The first ticks go
    forward only and the last ones backward only.

    Args:
      stages: devices along the pipeline.
      num_micro_batches: micro-batches. With several chunks, a number that `stages` does not divide
        leaves gaps, which `bubble` counts.
      num_chunks: model chunks of each stage (virtual pipeline stages, Megatron's
        ``virtual_pipeline_model_parallel_size``).

    References:
      Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
      section 2.2. https://arxiv.org/abs/2104.04473
    """

    stages: int
    num_micro_batches: int
    num_chunks: int = 1

    def __post_init__(self):
        for name in ("stages", "num_micro_batches", "num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    def forward_order(self, micro_batch: Any, chunk: Any) -> Any:
        """``n(m, j)``: the order in which every stage goes forward."""
        # Micro-batches go around in groups of as many as there are stages: when the last of a group
        # has left the first stage, the first of it comes back from the last stage.
        group, rest = micro_batch // self.stages, micro_batch % self.stages
        return group * self.stages * self.num_chunks + chunk * self.stages + rest

    def slot(self, work: Work) -> Any:
        """Where the input of a chunk is saved, below `num_saved`."""
        # A ring buffer: one input is saved per tick, and none is needed for more than `num_saved`.
        return self.forward_order(work.micro_batch, work.chunk) % self.num_saved

    def forward(self, tick: Any, stage: Any) -> Work:
        """What `stage` runs forward at `tick`."""
        return self._work_at(tick - stage)

    def backward(self, tick: Any, stage: Any) -> Work:
        """What `stage` runs backward at `tick`."""
        # The same walk from the last stage to the first, through the chunks from the last on.
        work = self._work_at(tick - self.warmup - (self.stages - 1 - stage))
        return work._replace(chunk=self.num_chunks - 1 - work.chunk)

    def _work_at(self, order: Any) -> Work:
        """The inverse of `forward_order`."""
        of_group = self.stages * self.num_chunks
        group, rest = order // of_group, order % of_group
        micro_batch, chunk = group * self.stages + rest % self.stages, rest // self.stages
        return Work(micro_batch, chunk, (order >= 0) & (micro_batch < self.num_micro_batches))

    @property
    def warmup(self) -> int:
        """Ticks before the first chunk goes backward."""
        return self.stages * self.num_chunks - 1

    @property
    def forward_ticks(self) -> int:
        """Ticks in which some stage goes forward; as many in which some stage goes backward."""
        return self.forward_order(self.num_micro_batches - 1, self.num_chunks - 1) + self.stages

    @property
    def ticks(self) -> int:
        """Ticks of a whole mini-batch."""
        return self.warmup + self.forward_ticks

    @property
    def bubble(self) -> float:
        """Idle time over working time of a stage, in lockstep.

        ``(stages - 1) / (num_micro_batches num_chunks)`` when `stages` divides `num_micro_batches`
        or there is one chunk.
        """
        return self.forward_ticks / (self.num_micro_batches * self.num_chunks) - 1

    @property
    def num_saved(self) -> int:
        """Inputs of chunks that a stage saves until they go backward: at most ``2 stages num_chunks
        - 1``, however many micro-batches there are.

        A message takes a tick each way, hence about twice what 1F1B saves where messages take no
        time.
        """
        return min(2 * self.stages * self.num_chunks - 1, self.forward_ticks - self.stages + 1)
