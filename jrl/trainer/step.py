"""Training step: collects completions, prepares their batch and runs the optimizer steps.

With asynchronous rollouts (`AsyncStep`) the sampler finishes the next batch while this one is
trained on.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.processes.progress import phase, sign
from jrl.recipes.base.batch import Batch, replicated, required, take_rows
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.collection.async_collector import (
    AsyncBuffer,
    AsyncBufferSpec,
    AsyncCollector,
    AsyncRollouts,
    check_staleness,
)
from jrl.rollout.collection.collect import Collected, batch_from_host, collect
from jrl.rollout.decoding.slots import SlotPool
from jrl.rollout.packing import MAX_ROWS_PER_BIN, clear_idle_rows, counts_of, pack_rows, plan
from jrl.rollout.resharding import are_disjoint
from jrl.rollout.sampler import Sampler, correct_of, scores_of, timed
from jrl.trainer.learner.learner import Learner
from jrl.trainer.learner.networks import (
    CriticObjective,
    Network,
    Networks,
    PolicyObjective,
    statistics_of,
)
from jrl.trainer.prepare import mismatch_metrics, prepare, statistics_of_step, temperatures
from jrl.trainer.scoring import logprobs_of
from jrl.trainer.state import Randomness, TrainState
from jrl.trainer.summary import count_updates, describe, summarise
from jrl.trainer.token_records import TokenLogConfig, TokenRecord, token_records
from sharding.sharded_jit import DeviceJit

SAMPLES_TIMING = "timing_s/samples"
"""Seconds spent on samples for people, which are no part of the step."""


@dataclass(frozen=True)
class NonFinite:
    """Update that was skipped because loss or gradient was not finite, with its mini-batch."""

    network: str
    batch: Batch[Array]
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class StepResult:
    """Result of a training step of any stage.

    Attributes:
      metrics: of the step.
      nonfinite: updates that were skipped.
    """

    metrics: dict[str, float]
    nonfinite: list[NonFinite]


@dataclass(frozen=True)
class RolloutStepResult(StepResult):
    """Result of a training step on sampled completions.

    Attributes:
      collected: the training batch.
      tokens: records of the tokens of some completions, by row; empty where none are requested.
    """

    collected: Collected
    tokens: dict[int, TokenRecord]


def train_step(
    sampler: Sampler,
    networks: Networks,
    state: TrainState[Array],
    randomness: Randomness,
    *,
    shuffle_rewards: bool = False,
    token_log: TokenLogConfig | None = None,
) -> tuple[TrainState[Array], RolloutStepResult]:
    """Runs one training step: samples, scores and updates. With asynchronous rollouts
    (`Networks.ahead_spec`), the step trains on a batch that was sampled before, and samples for
    later steps.

    Args:
      shuffle_rewards: true to permute the scores among the completions, a control experiment.
      token_log: number of token records to make; None makes none.
    """

    def train_on(collected: Collected) -> tuple[TrainState[Array], RolloutStepResult]:
        return _train_on_collected(
            networks, state, collected, randomness, shuffle_rewards, token_log
        )

    if networks.ahead_spec is not None:
        async_step = AsyncStep(sampler, networks, state)
        # Meanwhile the sampler uses the weights from the start of this step.
        with async_step.sampling() as wait_for_sampler:
            new_state, result = train_on(async_step.collected())
            async_result = wait_for_sampler()
        result = replace(result, metrics=result.metrics | async_result.seconds)
        new_state = replace(new_state, ahead=async_result.buffer, pool=async_result.pool)
        return new_state, result
    with phase("rollout"):
        # Collect: the policy is frozen while it samples, so all completions of a step are
        # on-policy.
        sampler.engine.load(state.policy.weights, int(state.step), state.entropy_statistics)
        # A task returns the same example for an id: the number of prompts used is all its state.
        collected = collect(
            sampler,
            networks.recipe,
            networks.mesh,
            int(state.prompts_seen),
            None if state.unfinished is None else to_host(state.unfinished),
        )
        # A rollout with another layout has a copy of the weights, which is freed for the updates.
        sampler.engine.release()
    return train_on(collected)


def _train_on_collected(
    networks: Networks,
    state: TrainState[Array],
    collected: Collected,
    randomness: Randomness,
    shuffle_rewards: bool,
    token_log: TokenLogConfig | None,
) -> tuple[TrainState[Array], RolloutStepResult]:
    """Runs the rest of a step after its completions were collected."""
    recipe, completions = networks.recipe, collected.completions
    scores, correct = scores_of(completions), correct_of(completions)
    if shuffle_rewards:
        # With an epoch number that no shuffle of rows has, so that no RNG key is used twice.
        order = randomness.shuffler(int(state.step), -1 % 2**32).permutation(len(scores))
        scores, correct = scores[order], correct[order]
        # Rewards of turns are dropped: they would not match the permuted scores.
        collected = replace(collected, batch=replace(collected.batch, turn_rewards=None))
    with phase("scoring"):
        batch, prepare_metrics = prepare(
            networks, state, completions, scores, collected.batch, correct
        )
    sampled, sampling = collected.batch.mask, networks.policy.objective.sampling
    # Over all sampled tokens: `prepare` may have removed tokens from the mask of `batch`.
    if state.entropy_statistics is not None:
        temperature_metrics = to_host(
            temperatures(sampling, batch, sampled, state.entropy_statistics)
        )
        prepare_metrics |= {name: float(value) for name, value in temperature_metrics.items()}
    tokens = dict[int, TokenRecord]()
    if token_log is not None:
        # Scored before the updates, which donate the buffers of these weights.
        policy = state.policy.weights
        with timed(SAMPLES_TIMING, prepare_metrics):
            tokens = token_records(networks, policy, completions, collected.batch, batch, token_log)
    # With the policy that sampled: before the updates, for the sampler of the next step.
    statistics = statistics_of_step(networks, batch, sampled, state.entropy_statistics)
    with phase("update"):
        state, history, nonfinite, seconds = train_on_batch(networks, state, batch, randomness)
    state = replace(
        state,
        entropy_statistics=statistics,
        step=state.step + 1,
        prompts_seen=to_devices(
            np.asarray(collected.prompts_seen, np.int32), replicated(networks.mesh)
        ),
        # On the devices like all of the state: a checkpoint is one pytree with one layout.
        unfinished=None
        if collected.unfinished is None
        else to_devices(collected.unfinished, replicated(networks.mesh)),
    )
    metrics = {
        **collected.metrics,
        **describe(
            completions,
            batch,
            sampled,
            recipe.group_size if recipe.has_complete_groups else None,
        ),
        **summarise(history),
        **count_updates(history),
        **collected.seconds,
        **prepare_metrics,
        **seconds,
    }
    # The sampler is compared with the trainer in the first update of the policy; without one, here.
    # `state.step` counts this step by now, which `train_on_batch` did not see counted.
    if int(state.step) <= recipe.value_pretraining_steps:
        metrics |= sampling_difference(networks, state, batch)
    else:
        # `updates` counts the steps taken, of which the first is number 0 to the schedule.
        metrics["actor/lr"] = networks.policy.optimizer.rate_at(int(state.policy.updates) - 1)
    if state.critic is not None:
        assert networks.critic is not None
        metrics["critic/lr"] = networks.critic.optimizer.rate_at(int(state.critic.updates) - 1)
    return state, RolloutStepResult(metrics, nonfinite, collected, tokens)


def train_on_batch(
    networks: Networks, state: TrainState[Array], batch: Batch[Array], randomness: Randomness
) -> tuple[TrainState[Array], list[dict[str, dict[str, Any]]], list[NonFinite], dict[str, float]]:
    """Runs all optimizer steps of one training step.

    Returns:
      The state, the metrics of each mini-batch under "actor" and "critic", the updates that were
      skipped because they were not finite, and the seconds spent.
    """
    recipe = networks.recipe
    # VC-PPO (arXiv:2503.01491): advantages by an untrained critic would mislead the policy, so only
    # the critic is trained first.
    pretraining = int(state.step) < recipe.value_pretraining_steps
    history: list[dict[str, dict[str, Any]]] = []
    nonfinite: list[NonFinite] = []
    seconds = {"timing_s/update_actor": 0.0, "timing_s/update_critic": 0.0}
    # Read from the devices once for all mini-batches of the step.
    counts = counts_of(batch) if networks.packs else None

    def learn(
        name: str, learner: Learner[Array], rows: Batch[Array], row_indices: np.ndarray
    ) -> Learner[Array]:
        begin = time.perf_counter()
        # The critic's mask may contain more tokens (T-PPO) or fewer than the policy's.
        if name == "critic" and rows.critic_mask is not None:
            rows = replace(rows, mask=rows.critic_mask)
        # A row of windows may have no token in this network's loss mask.
        if not recipe.has_complete_groups:
            rows = clear_idle_rows(rows)
        row_counts = None
        if counts is not None:
            row_counts = counts.for_network(name, row_indices, recipe.has_complete_groups)
        network, statistics = networks.critic if name == "critic" else networks.policy, None
        assert network is not None
        if name == "actor" and recipe.uses_statistics:
            # With the current policy: a quantile over the mini-batch changes with every update.
            statistics = statistics_of(network.objective, learner.weights, rows)
        learner, metrics = update_rows(network, learner, rows, row_counts, statistics)
        # Scalars; reading them blocks until the update has finished, for the timing.
        history[-1][name] = metrics = to_host(metrics)
        if not metrics["finite"]:
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            nonfinite.append(NonFinite(name, rows, loss, norm))
        seconds[f"timing_s/update_{name}"] += time.perf_counter() - begin
        return learner

    for epoch in range(recipe.epochs):
        for row_indices in mini_batches(recipe, randomness.shuffler(int(state.step), epoch)):
            # A gather on the mesh: the batch is not copied to the host.
            rows = take_rows(batch, row_indices, networks.mesh)
            history.append({})
            sign(f"mini-batch {len(history)}")
            # The critic comes first; neither update uses the other's new weights in this step.
            if state.critic is not None:
                state = replace(state, critic=learn("critic", state.critic, rows, row_indices))
            if not pretraining:
                state = replace(state, policy=learn("actor", state.policy, rows, row_indices))
    return state, history, nonfinite, seconds


def update_rows(
    network: Network[PolicyObjective] | Network[CriticObjective],
    learner: Learner[Array],
    rows: Batch[Array],
    row_counts: tuple[np.ndarray, np.ndarray] | None,
    statistics: Any = None,
    max_rows_per_bin: int = MAX_ROWS_PER_BIN,
) -> tuple[Learner[Array], dict[str, Any]]:
    """Runs one optimizer step on a mini-batch.

    Args:
      row_counts: number of tokens of each row and of those in the loss mask, by which rows are
        packed; None runs unpacked rows.
      max_rows_per_bin: maximum number of rows per bin, where they are packed.
    """
    if row_counts is None:
        return network.update(learner, rows, statistics)
    tokens, loss_tokens = row_counts
    if not loss_tokens.any():
        # Known to all processes alike; the update would change nothing.
        return learner, {"finite": np.True_, "empty": np.True_}
    mesh = network.mesh
    # Its sizes are static, each set of them a compiled function; `plan` rounds them to a few.
    plan_of_rows = plan(
        tokens, loss_tokens, rows.tokens.shape[1], network.bins, mesh, max_rows_per_bin
    )
    network = replace(
        network,
        objective=replace(network.objective, packed=plan_of_rows.sizes),
        num_micro_batches=plan_of_rows.num_micro_batches,
    )
    # The number of micro-batches with rows is an argument, without recompilation.
    passes = to_devices(np.int32(plan_of_rows.passes), replicated(mesh))
    return network.update(learner, pack_rows(rows, plan_of_rows, mesh), statistics, passes)


def mini_batches(recipe: Recipe, shuffler: np.random.Generator) -> np.ndarray:
    """Row indices of each mini-batch of an epoch, ``[mini_batches, mini_batch]``.

    Whole groups are shuffled where they divide mini-batches, so that completions can share their
    prompt in a forward pass, and single rows where they do not. The order does not depend on layout
    or micro-batch: a step is the same however it is split.
    """
    unit_size = recipe.group_size if recipe.has_complete_groups else 1
    unit_size = 1 if recipe.mini_batch_size % unit_size else unit_size
    units = np.arange(recipe.completions).reshape(-1, unit_size)
    return shuffler.permutation(units).reshape(-1, recipe.mini_batch_size)


def sampling_difference(
    networks: Networks, state: TrainState[Array], batch: Batch[Array]
) -> dict[str, float]:
    """Metrics of the mismatch between sampler and trainer for a step without an update of the
    policy; empty for an adaptive temperature, where `prepare` has computed them."""
    # The policy was not updated in this step: these weights are those that sampled.
    objective = networks.policy.objective
    if objective.sampling.adaptive is not None:
        return {}
    _, recomputed = logprobs_of(
        objective, state.policy.weights, batch.tokens, batch.valid, objective.replayed(batch)
    )
    # Reduced on the devices: one number per name is copied to the host.
    compared = to_host(_mismatch_of(recomputed, required(batch.behaviour_logprobs), batch.mask))
    return {
        name: float(value)
        for name, value in compared["differences"].items()
        if compared["any_token"]
    }


@DeviceJit
def _mismatch_of(logprobs: Array, sampled: Array, mask: Array) -> dict[str, Any]:
    """Mismatch metrics of two log-probabilities, and true if any token is in the mask."""
    return {"differences": mismatch_metrics(logprobs, sampled, mask), "any_token": jnp.any(mask)}


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
    """Completions of a step, which are available, and sampling of the next batch.

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
        sampler.engine.load(state.policy.weights, version, state.entropy_statistics)
        if state.pool is not None:
            sampler.engine.give_pool(state.pool)
        # Read back from the state even where this process sampled it: a resumed run takes the same
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
        # No times: the batch was sampled in the step before. Those of this step are in
        # `AsyncResult`.
        return Collected(async_batch.ready, batch, async_batch.prompts_seen, None, metrics, {})

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
