"""The decoding engine, which writes down what it does and how long that takes."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import monitoring

from jrl.rollout.decoding.engine import SlotEngine
from jrl.rollout.decoding.requests import Trajectory
from jrl.rollout.decoding.scheduler import AdmissionPlan

COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """How many programs this process has compiled since it was made."""

    def __init__(self) -> None:
        self.number = 0
        monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **details: Any) -> None:
        self.number += event == COMPILED


class Span(NamedTuple):
    """Something that the engine did.

    Attributes:
      seconds: that it took.
      compiled: whether something was compiled in it.
      tokens: that it ran or sampled.
      steps: of decoding.
      read: cached tokens that the steps had to read, over all rows.
    """

    seconds: float
    compiled: bool
    tokens: int
    steps: int = 0
    read: float = 0.0


class TimedEngine(SlotEngine):
    """Admissions and windows of decoding, each waited for to its end."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.admissions: list[Span] = []
        self.windows: list[Span] = []
        self._compilations = Compilations()

    def _admit(self, plan: AdmissionPlan) -> None:
        jax.block_until_ready(self._pool)
        before, compiled = self.usage.prefilled, self._compilations.number
        began = time.perf_counter()
        super()._admit(plan)
        jax.block_until_ready(self._pool)
        seconds = time.perf_counter() - began
        new = self._compilations.number > compiled
        self.admissions.append(Span(seconds, new, self.usage.prefilled - before))

    def _advance(self) -> list[Trajectory]:
        # A row that has just come has one token more than the host has been told of.
        lengths = np.asarray(self._ensure_pool().rows.lengths, np.float64)
        usage = self.usage.copy()
        compiled, began = self._compilations.number, time.perf_counter()
        done = super()._advance()
        seconds = time.perf_counter() - began
        did = self.usage.since(usage)
        # A row that grows from a to b tokens is read at a, a + 1, ..., b - 1.
        read = float(np.sum((self._lengths + lengths - 1) * (self._lengths - lengths) / 2))
        new = self._compilations.number > compiled
        self.windows.append(Span(seconds, new, did.row_steps, did.steps, read))
        return done


def together(spans: list[Span]) -> Span:
    """The sum of those in which nothing was compiled; of all where something always was."""
    counted = [span for span in spans if not span.compiled] or spans
    seconds, _, *numbers = (sum(column) for column in zip(*counted, strict=True))
    return Span(seconds, all(span.compiled for span in spans), *numbers)
