"""Pipeline schedule: the micro-batch that each stage runs at each tick, in plain arithmetic.

The layers are split into ``stages x num_chunks`` model chunks, and model chunk ``c`` is on stage
``c % stages``: a micro-batch passes through the stages ``num_chunks`` times. Time is divided into
ticks. In a tick a stage runs at most one chunk, forward or backward, and its output is available in
the next tick: activations on the next stage, gradients on the previous one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

StagePair = tuple[int, int]
"""Stages of a message: sender and receiver."""


class Work(NamedTuple):
    """Work of a stage in a tick: numbers, or traced scalars.

    Attributes:
      micro_batch: index of the micro-batch.
      chunk: index of the model chunk among the chunks of this stage.
      active: true if there is work; else the other fields are meaningless.
    """

    micro_batch: Any
    chunk: Any
    active: Any


@dataclass(frozen=True)
class Schedule:
    """1F1B schedule (one forward, one backward), interleaved if a stage has multiple model chunks.

    With ``n(m, j) = (m // stages) stages num_chunks + j stages + m % stages`` and ``h = 1`` if a
    stage has one chunk, else ``h = 2``, stage ``s`` runs micro-batch ``m`` through its chunk ``j``
    forward at tick ``2 n(m, j) + h s`` and backward at tick ``warmup + 2 n(m, num_chunks - 1 - j) +
    h (stages - 1 - s)``: with one chunk a stage runs backward while its neighbours run forward,
    with multiple chunks all run forward in even ticks and backward in odd ones. The first ticks run
    forward only and the last ones backward only.

    Args:
      stages: devices along the pipeline.
      num_micro_batches: micro-batches. With multiple chunks, a number that `stages` does not divide
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
        """``n(m, j)``: the position of a chunk in the forward order of every stage."""
        # Micro-batches circulate in groups of as many as there are stages: when the last of a group
        # has left the first stage, the first of it returns from the last stage.
        group, rest = micro_batch // self.stages, micro_batch % self.stages
        return group * self.stages * self.num_chunks + chunk * self.stages + rest

    def forward_only(self, tick: Any, stage: Any) -> Work:
        """Work of `stage` at `tick` in a forward-only schedule: a chunk in every tick."""
        return self._work_at(tick - stage)

    def forward(self, tick: Any, stage: Any) -> Work:
        """Forward work of `stage` at `tick`."""
        return self._every_other(tick - self._hop * stage)

    def backward(self, tick: Any, stage: Any) -> Work:
        """Backward work of `stage` at `tick`."""
        # The forward order reversed: from the last stage to the first, from the last chunk on.
        work = self._every_other(tick - self.warmup - self._hop * (self.stages - 1 - stage))
        return work._replace(chunk=self.num_chunks - 1 - work.chunk)

    def messages(self, parity: int) -> tuple[list[StagePair], list[StagePair]]:
        """(Sender, receiver) pairs after the ticks of a parity: of activations, and of gradients.

        No other stages synchronize: a stage that runs forward does not wait until the next stage
        has reached the same tick.
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
        # With multiple chunks micro-batches return to the first stage at the rate at which it takes
        # them, one every other tick, only if each hop takes two ticks.
        return 1 if self.num_chunks == 1 else 2

    def _every_other(self, tick: Any) -> Work:
        work = self._work_at(tick // 2)
        return work._replace(active=work.active & (tick % 2 == 0))

    def _work_at(self, order: Any) -> Work:
        """The inverse of `forward_order`."""
        per_group = self.stages * self.num_chunks
        group, rest = order // per_group, order % per_group
        micro_batch, chunk = group * self.stages + rest % self.stages, rest // self.stages
        return Work(micro_batch, chunk, (order >= 0) & (micro_batch < self.num_micro_batches))

    @property
    def warmup(self) -> int:
        """Ticks before the first backward chunk."""
        return 2 * self.stages * (self.num_chunks - 1) + self._hop * (self.stages - 1) + 1

    @property
    def forward_ticks(self) -> int:
        """Ticks of a forward-only schedule."""
        return self.forward_order(self.num_micro_batches - 1, self.num_chunks - 1) + self.stages

    @property
    def ticks(self) -> int:
        """Ticks of a whole mini-batch."""
        last = self.forward_order(self.num_micro_batches - 1, self.num_chunks - 1)
        return self.warmup + 2 * last + self._hop * (self.stages - 1) + 1

    @property
    def bubble(self) -> float:
        """Bubble fraction: idle time over working time of a stage that waits for its inputs only.

        ``(stages - 1) / (num_micro_batches num_chunks)`` when `stages` divides `num_micro_batches`
        or there is one chunk; else a bound: the value for all stages in lockstep.
        """
        return self.forward_ticks / (self.num_micro_batches * self.num_chunks) - 1

    def slots(self, chunks: Sequence[int] | None = None) -> list[list[int]]:
        """Buffer slots ``[micro_batch][chunk]`` of the residuals between forward and backward pass.

        They are as few as residuals are kept simultaneously. With one chunk these are `stages`,
        with multiple ``stages num_chunks + stages - 1``, however many micro-batches there are;
        fewer if there are few micro-batches.

        Args:
          chunks: of which residuals are kept; None is all.
        """
        # Computed for the first stage. The others keep residuals for a shorter time, in the same
        # order.
        slots = [[0] * self.num_chunks for _ in range(self.num_micro_batches)]
        free: list[int] = []
        num_slots = 0
        for tick in range(self.ticks):
            work = self.forward(tick, 0)
            if work.active and (chunks is None or work.chunk in chunks):
                if not free:
                    free, num_slots = [num_slots], num_slots + 1
                slots[work.micro_batch][work.chunk] = free.pop()
            work = self.backward(tick, 0)
            if work.active and (chunks is None or work.chunk in chunks):
                free.append(slots[work.micro_batch][work.chunk])
        return slots
