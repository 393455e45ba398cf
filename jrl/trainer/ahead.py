"""Steps whose sampler is ahead: it finishes the next batch while this one is learned from."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.batching import batch_from_host, replicated
from jrl.rollout.collection.ahead import Ahead, AheadSpec, Drawn, check_staleness
from jrl.rollout.collection.collect import Collected
from jrl.rollout.collection.lookahead import LookAhead
from jrl.rollout.decoding.programs.slots import Pool
from jrl.rollout.resharding import apart
from jrl.rollout.sampler import Sampler
from jrl.trainer.setup.networks import Networks
from jrl.trainer.state import TrainState


class Stored(NamedTuple):
    """What a step leaves to those after it.

    Attributes:
      ahead, pool: of the state.
      seconds: spent in sampling.
    """

    ahead: Ahead[Array]
    pool: Pool[Array] | None
    seconds: dict[str, float]


class AheadOfStep:
    """A step's completions, which are there, and those of the next, which are being sampled.

    On devices of its own the sampler works at the same time as the updates, else before them, with
    the same weights and so with the same result.

    Args:
      sampler: whose engine gets the weights; nothing is under way in it.
      networks: that are about to learn.
      recipe: what a step collects.
      state: before the step.
    """

    def __init__(
        self, sampler: Sampler, networks: Networks, recipe: Recipe, state: TrainState[Array]
    ):
        self._sampler, self._networks, self._recipe = sampler, networks, recipe
        self._seconds = {"timing_s/gen": 0.0, "timing_s/reward": 0.0}
        version, bound = int(state.step), networks.max_staleness
        self._before = sampler.engine.usage.copy()
        # As an engine that has just been made, which it is after a restart.
        sampler.engine.release()
        sampler.engine.load(state.policy.weights, version, state.entropy_statistics)
        if state.pool is not None:
            sampler.engine.give_pool(state.pool)
        # Read back from the state even where this process sampled it: a run that goes on after a
        # kill takes the same path.
        spec = networks.ahead_spec
        assert spec is not None and state.ahead is not None
        self._spec: AheadSpec = spec
        drawn = spec.unpacked(to_host(state.ahead), sampler)
        # The first step finds nothing waiting, and samples its own batch first.
        if drawn is None:
            drawn = self._draw(int(state.prompts_seen))
        staleness = check_staleness(drawn.ready, version, bound)
        self._drawn = drawn
        self._metrics = {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": float(staleness.max()),
        }

    def collected(self) -> Collected:
        """What the step learns from."""
        drawn, networks, sampler = self._drawn, self._networks, self._sampler
        batch = batch_from_host(
            [completion.trajectory for completion in drawn.ready],
            drawn.counts,
            networks.mesh,
            sampler.prompt_length,
            sampler.response_length,
            sampler.format.tokenizer.pad_id,
            networks.policy.config.num_experts,
        )
        metrics = drawn.metrics | self._metrics
        # No times: it was sampled in the step before. Those of this step are in `Stored`.
        return Collected(drawn.ready, batch, drawn.prompts_seen, None, metrics, {})

    @contextmanager
    def sampling(self) -> Iterator[Callable[[], Stored]]:
        """A block in which the step learns.

        Yields:
          What gives what is ahead after the step; it waits for the sampler, as the end of the block
          does.
        """
        drawn, engine = self._drawn, self._sampler.engine

        def draw() -> Drawn:
            return self._draw(drawn.prompts_seen, drawn)

        if not apart(self._networks.mesh, engine.mesh):
            # By the weights before this step's updates, as beside them: the same rows either way.
            stored = self._stored(draw(), 0.0)
            engine.release()  # memory for the updates
            yield lambda: stored
            return
        # The executor is waited for at the end of the block, so a failing step leaves no thread
        # behind.
        # One thread, as the engine's slots are changed by one call at a time.
        with ThreadPoolExecutor(1, "jrl rollout") as thread:
            future = thread.submit(draw)

            def waited() -> Stored:
                begin = time.perf_counter()
                after = future.result()
                return self._stored(after, time.perf_counter() - begin)

            yield waited

    def _draw(self, first: int, behind: Drawn | None = None) -> Drawn:
        ahead = LookAhead(
            self._sampler,
            self._recipe,
            batches=self._networks.max_staleness,
            first=first,
            keep_pool=self._networks.pool_spec is not None,
            seconds=self._seconds,
        )
        return ahead.draw([] if behind is None else behind.pending)

    def _stored(self, drawn: Drawn, waited: float) -> Stored:
        seconds = self._seconds | {
            "timing_s/wait_for_rollout": waited,
            **self._sampler.engine.usage.since(self._before).metrics(),
        }
        ahead = to_devices(self._spec.packed(drawn), replicated(self._networks.mesh))
        # Taken out of the engine: in the state a checkpoint has the slots, and the next step gives
        # them back.
        keeps_pool = self._networks.pool_spec is not None
        return Stored(ahead, self._sampler.engine.take_pool() if keeps_pool else None, seconds)
