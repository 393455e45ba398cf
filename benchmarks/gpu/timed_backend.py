"""The backend of one mesh, which writes down what it does and how long that takes."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import monitoring
from jaxtyping import Array

from jrl.rollout.decoding.mesh_backend import Advanced, MeshBackend, StepLimits
from jrl.rollout.decoding.prefill import AdmissionArrays
from jrl.rollout.decoding.slots import Decoder, SamplerState, SlotPool
from jrl.rollout.sampling import Sampling
from sharding.folding import FoldedMesh

COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """How many programs this process has compiled since it was made."""

    def __init__(self) -> None:
        self.number = 0
        monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **details: Any) -> None:
        self.number += event == COMPILED


class Span(NamedTuple):
    """Something that the backend did.

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


class TimedBackend(MeshBackend):
    """Admissions and windows of decoding, each waited for to its end."""

    def __init__(self, decoder: Decoder, training: FoldedMesh):
        super().__init__(decoder, training)
        self.admissions: list[Span] = []
        self.windows: list[Span] = []
        self._compilations = Compilations()

    def admit(
        self,
        pool: SlotPool[Array],
        tokens: Array,
        lengths: Array,
        admission: AdmissionArrays[Array],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], bool]:
        jax.block_until_ready((pool, tokens))
        num_tokens, compiled = int(np.sum(np.asarray(lengths))), self._compilations.number
        began = time.perf_counter()
        done = super().admit(pool, tokens, lengths, admission, sampling, state)
        jax.block_until_ready(done)
        seconds = time.perf_counter() - began
        self.admissions.append(Span(seconds, self._compilations.number > compiled, num_tokens))
        return done

    def decode(
        self,
        pool: SlotPool[Array],
        cache_length: int,
        limits: StepLimits[Any],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], Advanced]:
        # A row that has just come has one token more than the host has been told of.
        before = np.asarray(pool.rows.lengths, np.float64)
        compiled, began = self._compilations.number, time.perf_counter()
        pool, did = super().decode(pool, cache_length, limits, sampling, state)
        jax.block_until_ready(pool)
        seconds = time.perf_counter() - began
        # A row that grows from a to b tokens is read at a, a + 1, ..., b - 1.
        after = np.asarray(pool.rows.lengths, np.float64)
        read = float(np.sum((after + before - 1) * (after - before) / 2))
        new = self._compilations.number > compiled
        self.windows.append(Span(seconds, new, int(did.row_steps), int(did.steps), read))
        return pool, did


def together(spans: list[Span]) -> Span:
    """The sum of those in which nothing was compiled; of all where something always was."""
    counted = [span for span in spans if not span.compiled] or spans
    seconds, _, *numbers = (sum(column) for column in zip(*counted, strict=True))
    return Span(seconds, all(span.compiled for span in spans), *numbers)
