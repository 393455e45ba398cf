"""Training step: collects completions, prepares their batch and runs the optimizer steps."""

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import Batch, given
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.batching import replicated, take_rows
from jrl.rollout.collection.collect import Collected, collect
from jrl.rollout.sampler import Sampler, correct_of, scores_of
from jrl.rollout.timing import timed
from jrl.trainer.ahead import AheadOfStep
from jrl.trainer.learner.learner import Learner
from jrl.trainer.learner.objectives import CriticObjective, PolicyObjective
from jrl.trainer.packed.plan import (
    ROWS_OF_A_BIN,
    counts_of,
    place_rows,
    plan,
    without_idle,
)
from jrl.trainer.prepare import difference, prepare
from jrl.trainer.scoring import logprobs_of, statistics_of
from jrl.trainer.setup.networks import Network, Networks
from jrl.trainer.setup.randomness import Randomness
from jrl.trainer.state import TrainState
from jrl.trainer.summary import count_updates, describe, summarise
from jrl.trainer.temperature import statistics_of_step, temperatures
from jrl.trainer.token_records import TokenRecord, Watched, token_records

TO_SHOW = "timing_s/samples"
"""Seconds spent on samples for people, which are no part of the step."""


@dataclass(frozen=True)
class NonFinite:
    """Update that was skipped because loss or gradient was not finite, with its mini-batch."""

    network: str
    batch: Batch[Array]
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Done:
    """Result of a training step of any stage.

    Attributes:
      metrics: of the step.
      nonfinite: updates that were skipped.
    """

    metrics: dict[str, float]
    nonfinite: list[NonFinite]


@dataclass(frozen=True)
class Step(Done):
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
    recipe: Recipe,
    state: TrainState[Array],
    randomness: Randomness,
    *,
    shuffle_rewards: bool = False,
    watched: Watched | None = None,
) -> tuple[TrainState[Array], Step]:
    """Runs one training step: samples, scores and updates. With asynchronous rollouts
    (`Networks.max_staleness`), the step trains on a batch that was sampled before, and samples for
    later steps.

    Args:
      shuffle_rewards: true to permute the scores among the completions, a control experiment.
      watched: number of token records to make; None makes none.
    """
    fixed = networks, recipe, sampler.response_length, randomness, shuffle_rewards, watched
    if networks.max_staleness:
        ahead = AheadOfStep(sampler, networks, recipe, state)
        # Meanwhile the sampler uses the weights from the start of this step.
        with ahead.sampling() as sampled:
            state, done = _learned(*fixed, state, ahead.collected())
            stored = sampled()
        done = replace(done, metrics=done.metrics | stored.seconds)
        return replace(state, ahead=stored.ahead, pool=stored.pool), done
    # Collect: the policy is frozen while it samples, so all completions of a step are on-policy.
    sampler.engine.load(state.policy.weights, int(state.step), state.entropy_statistics)
    # A task returns the same example for an id: the number of prompts used is all its state.
    collected = collect(
        sampler,
        recipe,
        networks.mesh,
        int(state.prompts_seen),
        None if state.unfinished is None else to_host(state.unfinished),
    )
    # A rollout with another layout has a copy of the weights, which is freed for the updates.
    sampler.engine.release()
    return _learned(*fixed, state, collected)


def _learned(
    networks: Networks,
    recipe: Recipe,
    response_length: int,
    randomness: Randomness,
    shuffle_rewards: bool,
    watched: Watched | None,
    state: TrainState[Array],
    collected: Collected,
) -> tuple[TrainState[Array], Step]:
    """Runs the rest of a step after its completions were collected."""
    number, scores = int(state.step), scores_of(collected.completions)
    correct = correct_of(collected.completions)
    if shuffle_rewards:
        # With an epoch number that no shuffle of rows has, so that no RNG key is used twice.
        order = randomness.shuffler(number, -1 % 2**32).permutation(len(scores))
        scores, correct = scores[order], correct[order]
        # Rewards of turns are dropped: they would not match the permuted scores.
        collected = replace(collected, batch=replace(collected.batch, turn_rewards=None))
    batch, prepared = prepare(
        networks,
        recipe,
        state,
        collected.completions,
        scores,
        collected.batch,
        response_length,
        correct,
    )
    sampled, sampling = collected.batch.mask, networks.policy.objective.sampling
    # Over all sampled tokens: `prepare` may have removed tokens from the mask of `batch`.
    if state.entropy_statistics is not None:
        found = to_host(temperatures(sampling, batch, sampled, state.entropy_statistics))
        prepared |= {name: float(value) for name, value in found.items()}
    tokens = dict[int, TokenRecord]()
    if watched is not None:
        # Scored before the updates, which donate the buffers of these weights.
        policy = state.policy.weights
        before = collected.completions, collected.batch
        with timed(TO_SHOW, prepared):
            tokens = token_records(networks, policy, *before, batch, watched)
    # With the policy that sampled: before the updates, for the sampler of the next step.
    statistics = statistics_of_step(recipe, batch, sampled, state.entropy_statistics, networks.mesh)
    state, history, nonfinite, seconds = train_on_batch(networks, recipe, state, batch, randomness)
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
            collected.completions,
            batch,
            sampled,
            recipe.group_size if recipe.whole_groups else None,
        ),
        **summarise(history),
        **count_updates(history),
        **collected.seconds,
        **prepared,
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
    return state, Step(metrics, nonfinite, collected, tokens)


def train_on_batch(
    networks: Networks,
    recipe: Recipe,
    state: TrainState[Array],
    batch: Batch[Array],
    randomness: Randomness,
) -> tuple[TrainState[Array], list[dict[str, dict[str, Any]]], list[NonFinite], dict[str, float]]:
    """Runs all optimizer steps of one training step.

    Returns:
      The state, the metrics of each mini-batch under "actor" and "critic", the updates that were
      skipped because they were not finite, and the seconds spent.
    """
    # VC-PPO (arXiv:2503.01491): advantages by an untrained critic would mislead the policy, so only
    # the critic is trained first.
    pretraining = int(state.step) < recipe.value_pretraining_steps
    history: list[dict[str, dict[str, Any]]] = []
    nonfinite: list[NonFinite] = []
    seconds = {"timing_s/update_actor": 0.0, "timing_s/update_critic": 0.0}
    # Read from the devices once for all mini-batches of the step.
    counts = counts_of(batch) if networks.packs else None

    def learn(
        name: str, learner: Learner[Array], rows: Batch[Array], chosen: np.ndarray
    ) -> Learner[Array]:
        begin = time.perf_counter()
        # The critic's mask may contain more tokens (T-PPO) or fewer than the policy's.
        if name == "critic" and rows.critic_mask is not None:
            rows = replace(rows, mask=rows.critic_mask)
        # A row of windows may have no token in this network's loss mask.
        if not recipe.whole_groups:
            rows = without_idle(rows)
        of_rows = None if counts is None else counts.of(name, chosen, recipe.whole_groups)
        if name == "actor":
            learner, metrics = _update_policy(networks, recipe, learner, rows, of_rows)
        else:
            assert networks.critic is not None
            learner, metrics = update_rows(networks.critic, learner, rows, of_rows)
        # Scalars; reading them blocks until the update has finished, for the timing.
        history[-1][name] = metrics = to_host(metrics)
        if not metrics["finite"]:
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            nonfinite.append(NonFinite(name, rows, loss, norm))
        seconds[f"timing_s/update_{name}"] += time.perf_counter() - begin
        return learner

    for epoch in range(recipe.epochs):
        for chosen in mini_batches(recipe, randomness.shuffler(int(state.step), epoch)):
            # A gather on the mesh: the batch is not copied to the host.
            rows = take_rows(batch, chosen, networks.mesh)
            history.append({})
            # The critic comes first; neither update uses the other's new weights in this step.
            if state.critic is not None:
                state = replace(state, critic=learn("critic", state.critic, rows, chosen))
            if not pretraining:
                state = replace(state, policy=learn("actor", state.policy, rows, chosen))
    return state, history, nonfinite, seconds


def _update_policy(
    networks: Networks,
    recipe: Recipe,
    learner: Learner[Array],
    rows: Batch[Array],
    of_rows: tuple[np.ndarray, np.ndarray] | None,
) -> tuple[Learner[Array], dict[str, Any]]:
    policy, statistics = networks.policy, None
    if recipe.uses_statistics:
        # With the current policy: a quantile over the mini-batch changes with every update.
        statistics = statistics_of(policy.objective, learner.weights, rows)
    return update_rows(policy, learner, rows, of_rows, statistics)


def update_rows(
    network: Network[PolicyObjective] | Network[CriticObjective],
    learner: Learner[Array],
    rows: Batch[Array],
    of_rows: tuple[np.ndarray, np.ndarray] | None,
    statistics: Any = None,
    rows_of_a_bin: int = ROWS_OF_A_BIN,
) -> tuple[Learner[Array], dict[str, Any]]:
    """Runs one optimizer step on a mini-batch.

    Args:
      of_rows: number of tokens of each row and of those in the loss mask, by which rows are packed;
        None runs unpacked rows.
      rows_of_a_bin: maximum number of rows per bin, where they are packed.
    """
    if of_rows is None:
        return network.update(learner, rows, statistics)
    tokens, counted = of_rows
    if not counted.any():
        # Known to all processes alike; the update would change nothing.
        return learner, {"finite": np.True_, "empty": np.True_}
    mesh = network.mesh
    # Its sizes are static, each set of them a compiled function; `plan` rounds them to a few.
    packed = plan(tokens, counted, rows.tokens.shape[1], network.bins, mesh, rows_of_a_bin)
    network = replace(
        network,
        objective=replace(network.objective, packed=packed.sizes),
        num_micro_batches=packed.num_micro_batches,
    )
    # The number of micro-batches with rows is an argument, without recompilation.
    passes = to_devices(np.int32(packed.passes), replicated(mesh))
    return network.update(learner, place_rows(rows, packed, mesh), statistics, passes)


def mini_batches(recipe: Recipe, shuffler: np.random.Generator) -> np.ndarray:
    """Row indices of each mini-batch of an epoch, ``[mini_batches, mini_batch]``.

    Whole groups are shuffled where they divide mini-batches, so that completions can share their
    prompt in a forward pass, and single rows where they do not. The order does not depend on layout
    or micro-batch: a step is the same however it is split.
    """
    together = recipe.group_size if recipe.whole_groups else 1
    together = 1 if recipe.mini_batch_size % together else together
    groups = np.arange(recipe.completions).reshape(-1, together)
    return shuffler.permutation(groups).reshape(-1, recipe.mini_batch_size)


def sampling_difference(
    networks: Networks, state: TrainState[Array], batch: Batch[Array]
) -> dict[str, float]:
    """Metrics of the mismatch between sampler and trainer for a step without an update of the
    policy; empty for an adaptive temperature, where `prepare` has computed them."""
    # The policy was not updated in this step: these weights are those that sampled.
    objective, rows = networks.policy.objective, (batch.tokens, batch.valid)
    if objective.sampling.adaptive is not None:
        return {}
    _, again = logprobs_of(objective, state.policy.weights, *rows, objective.replayed(batch))
    # Reduced on the devices: one number per name is copied to the host.
    found = to_host(_compared(again, given(batch.behaviour_logprobs), batch.mask))
    return {name: float(value) for name, value in found["differences"].items() if found["some"]}


@jax.jit
def _compared(logprobs: Array, sampled: Array, mask: Array) -> dict[str, Any]:
    """Mismatch metrics of two log-probabilities, and true if any token is in the mask."""
    return {"differences": difference(logprobs, sampled, mask), "some": jnp.any(mask)}
