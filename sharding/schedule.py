"""Which stage of a pipeline runs which micro-batch when, in plain arithmetic.

The layers are cut into ``stages x num_chunks`` model chunks, and model chunk ``c`` lies on stage
``c % stages``: a micro-batch goes around the stages ``num_chunks`` times. Time is cut into ticks.
In a tick a stage runs at most one chunk, forward or backward, and what it hands on is there for
the tick after: activations for the next stage, gradients for the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Pair = tuple[int, int]
"""Of stages: who sends, who receives."""


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

    With ``n(m, j) = (m // stages) stages num_chunks + j stages + m % stages`` and ``h = 1`` where a
    stage has one chunk, else ``h = 2``, stage ``s`` runs micro-batch ``m`` through its chunk ``j``
    forward at tick ``2 n(m, j) + h s`` and backward at tick ``warmup + 2 n(m, num_chunks - 1 - j) +
    h (stages - 1 - s)``: with one chunk a stage goes backward while its neighbours go forward, with
    several all go forward in even ticks and backward in odd ones. The first ticks go forward only
    and the last ones backward only.

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

    def forward_alone(self, tick: Any, stage: Any) -> Work:
        """What `stage` runs at `tick` where nothing goes backward: a chunk in every tick."""
        return self._work_at(tick - stage)

    def forward(self, tick: Any, stage: Any) -> Work:
        """What `stage` runs forward at `tick`."""
        return self._every_other(tick - self._hop * stage)

    def backward(self, tick: Any, stage: Any) -> Work:
        """What `stage` runs backward at `tick`."""
        # The same walk from the last stage to the first, through the chunks from the last on.
        work = self._every_other(tick - self.warmup - self._hop * (self.stages - 1 - stage))
        return work._replace(chunk=self.num_chunks - 1 - work.chunk)

    def messages(self, parity: int) -> tuple[list[Pair], list[Pair]]:
        """Who sends to whom after the ticks of a parity: activations, and gradients.

        Nobody else waits for anybody: a stage that goes forward has not to wait until the one after
        it has come as far.
        """
        last, n = self.stages - 1, self.stages
        around = range(n) if self.num_chunks > 1 else range(last)
        forward = [(s, (s + 1) % n) for s in around if self._hop * s % 2 == parity]
        backward = [
            ((s + 1) % n, s)
            for s in around
            if (self.warmup + self._hop * (last - (s + 1) % n)) % 2 == parity
        ]
        return forward, sorted(backward)

    @property
    def _hop(self) -> int:
        """Ticks from a stage to the next."""
        # Micro-batches that come round again come as fast as stages take new ones, one every other
        # tick, only if they do not hurry.
        return 1 if self.num_chunks == 1 else 2

    def _every_other(self, tick: Any) -> Work:
        work = self._work_at(tick // 2)
        return work._replace(active=work.active & (tick % 2 == 0))

    def _work_at(self, order: Any) -> Work:
        """The inverse of `forward_order`."""
        of_group = self.stages * self.num_chunks
        group, rest = order // of_group, order % of_group
        micro_batch, chunk = group * self.stages + rest % self.stages, rest // self.stages
        return Work(micro_batch, chunk, (order >= 0) & (micro_batch < self.num_micro_batches))

    @property
    def warmup(self) -> int:
        """Ticks before the first chunk goes backward."""
        return 2 * self.stages * (self.num_chunks - 1) + self._hop * (self.stages - 1) + 1

    @property
    def forward_ticks(self) -> int:
        """Ticks of a way forward alone."""
        return self.forward_order(self.num_micro_batches - 1, self.num_chunks - 1) + self.stages

    @property
    def ticks(self) -> int:
        """Ticks of a whole mini-batch."""
        last = self.forward_order(self.num_micro_batches - 1, self.num_chunks - 1)
        return self.warmup + 2 * last + self._hop * (self.stages - 1) + 1

    @property
    def bubble(self) -> float:
        """Idle time over working time of a stage that waits for what it needs and nothing else.

        ``(stages - 1) / (num_micro_batches num_chunks)`` when `stages` divides `num_micro_batches`
        or there is one chunk; else a bound, that of all stages in lockstep.
        """
        return self.forward_ticks / (self.num_micro_batches * self.num_chunks) - 1

    def slots(self, chunks: Sequence[int] | None = None) -> list[list[int]]:
        """``[micro_batch][chunk]``: a place for what a stage keeps of a chunk from its way forward
        to its way backward, of as few places as there are kept at once.

        With one chunk these are `stages`, with several ``stages num_chunks + stages - 1``, however
        many micro-batches there are; fewer where there are few micro-batches.

        Args:
          chunks: of which something is kept; None is all.
        """
        # Made for the first stage. The others keep each for a shorter time, in the same order.
        slots = [[0] * self.num_chunks for _ in range(self.num_micro_batches)]
        free: list[int] = []
        number = 0
        for tick in range(self.ticks):
            work = self.forward(tick, 0)
            if work.active and (chunks is None or work.chunk in chunks):
                if not free:
                    free, number = [number], number + 1
                slots[work.micro_batch][work.chunk] = free.pop()
            work = self.backward(tick, 0)
            if work.active and (chunks is None or work.chunk in chunks):
                free.append(slots[work.micro_batch][work.chunk])
        return slots
