"""Asynchronous rollouts of a training step: the sampler finishes the next batch while the step
trains on one that was sampled before."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.processes.progress import phase
from jrl.recipes.base.batch import replicated
from jrl.rollout.collection.async_collector import (
    AsyncBuffer,
    AsyncBufferSpec,
    AsyncCollector,
    AsyncRollouts,
    check_staleness,
)
from jrl.rollout.collection.collect import Collected, batch_from_host
from jrl.rollout.decoding.slots import SlotPool
from jrl.rollout.resharding import are_disjoint
from jrl.rollout.sampler import Sampler
from jrl.trainer.learner.networks import Networks
from jrl.trainer.state import TrainState


class AsyncResult(NamedTuple):
    """Result of asynchronous sampling, stored in the state for the next step.

    Attributes:
      buffer, pool: of the state.
      seconds: spent in sampling.
    """

    buffer: AsyncBuffer[Array]
    pool: SlotPool[Array] | None
    seconds: dict[str, float]


class AsyncStep:
    """Available completions of a step, and sampling of the next batch.

    On separate devices the sampler runs concurrently with the updates, else before them, with the
    same weights and so with the same result.

    Args:
      sampler: its engine gets the weights; no request is in flight in it.
      networks: that are about to be updated.
      state: before the step.
    """

    def __init__(self, sampler: Sampler, networks: Networks, state: TrainState[Array]):
        self._sampler, self._networks = sampler, networks
        self._seconds = {"timing_s/gen": 0.0, "timing_s/reward": 0.0}
        version = int(state.step)
        self._before = sampler.engine.usage.copy()
        # Reset to the state of a new engine, which it is after a restart.
        sampler.engine.release()
        sampler.engine.load(state.policy.weights, version)
        if state.pool is not None:
            sampler.engine.give_pool(state.pool)
        # Read back from the state even if this process sampled it: a resumed run takes the same
        # path.
        spec = networks.ahead_spec
        assert spec is not None and state.ahead is not None
        self._spec: AsyncBufferSpec = spec
        async_batch = spec.unpack(to_host(state.ahead), sampler)
        # In the first step nothing was sampled ahead: it samples its own batch first.
        if async_batch is None:
            async_batch = self._draw(int(state.prompts_seen))
        staleness = check_staleness(async_batch.ready, version, spec.batches)
        self._async_batch = async_batch
        self._metrics = {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": float(staleness.max()),
        }

    def collected(self) -> Collected:
        """Training batch of the step."""
        async_batch, networks, sampler = self._async_batch, self._networks, self._sampler
        batch = batch_from_host(
            [completion.trajectory for completion in async_batch.ready],
            async_batch.counts,
            networks.mesh,
            sampler.prompt_length,
            sampler.response_length,
            sampler.format.tokenizer.pad_id,
            networks.policy.config.num_experts,
        )
        metrics = async_batch.metrics | self._metrics
        # No times: the batch was sampled in the step before. The times of this step are in
        # `AsyncResult`.
        return Collected(async_batch.ready, batch, async_batch.prompts_seen, {}, metrics, {})

    @contextmanager
    def sampling(self) -> Iterator[Callable[[], AsyncResult]]:
        """Context manager around the updates of the step, which samples ahead.

        Yields:
          A function that returns the sampled rows after the step; it waits for the sampler, as the
          end of the block does.
        """
        async_batch, engine = self._async_batch, self._sampler.engine

        def draw() -> AsyncRollouts:
            return self._draw(async_batch.prompts_seen, async_batch)

        if not are_disjoint(self._networks.mesh, engine.mesh):
            # Sampled with the weights before this step's updates, as in the concurrent case: the
            # same rows either way.
            stored = self._store(draw(), 0.0)
            engine.release()  # memory for the updates
            yield lambda: stored
            return
        # The executor is joined at the end of the block, so a failing step leaves no thread behind.
        # One thread, as the engine's slots are changed by one call at a time.
        with ThreadPoolExecutor(1, "jrl rollout") as thread:
            future = thread.submit(draw)

            def wait_for_sampler() -> AsyncResult:
                begin = time.perf_counter()
                with phase("rollout"):
                    after = future.result()
                return self._store(after, time.perf_counter() - begin)

            yield wait_for_sampler

    def _draw(self, first: int, previous: AsyncRollouts | None = None) -> AsyncRollouts:
        collector = AsyncCollector(
            self._sampler,
            self._networks.recipe,
            batches=self._spec.batches,
            first=first,
            keep_pool=self._networks.pool_spec is not None,
            seconds=self._seconds,
        )
        with phase("rollout"):
            return collector.collect_batch([] if previous is None else previous.pending)

    def _store(self, async_batch: AsyncRollouts, waited: float) -> AsyncResult:
        seconds = self._seconds | {
            "timing_s/wait_for_rollout": waited,
            **self._sampler.engine.usage.since(self._before).metrics(),
        }
        buffer = to_devices(self._spec.pack(async_batch), replicated(self._networks.mesh))
        # Removed from the engine: the slots are part of the state for a checkpoint, and the next
        # step gives them back.
        keeps_pool = self._networks.pool_spec is not None
        return AsyncResult(
            buffer, self._sampler.engine.take_pool() if keeps_pool else None, seconds
        )
