"""A training step: completions, what is known of them, optimizer steps."""

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
"""Seconds of what is only looked at: no part of the step."""


@dataclass(frozen=True)
class NonFinite:
    """An update that was skipped, with the rows it would have learned from."""

    network: str
    batch: Batch[Array]
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Done:
    """What a step did, whatever it learned from.

    Attributes:
      metrics: of the step.
      nonfinite: updates that were skipped.
    """

    metrics: dict[str, float]
    nonfinite: list[NonFinite]


@dataclass(frozen=True)
class Step(Done):
    """What a step on completions did.

    Attributes:
      collected: what it learned from.
      tokens: what is kept of completions, by their rows; empty where nothing is to be.
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
    """Samples, scores and learns once. Where the sampler may be ahead (`Networks.max_staleness`),
    what is learned from is there already, and what is sampled is for the steps after this one.

    Args:
      shuffle_rewards: whether scores are dealt out anew among the completions: nothing can be
        learned then.
      watched: how much is kept of the tokens of some completions; None keeps nothing.
    """
    fixed = networks, recipe, sampler.response_length, randomness, shuffle_rewards, watched
    if networks.max_staleness:
        ahead = AheadOfStep(sampler, networks, recipe, state)
        # What is sampled meanwhile is drawn by the weights that this step began with.
        with ahead.sampling() as sampled:
            state, done = _learned(*fixed, state, ahead.collected())
            stored = sampled()
        done = replace(done, metrics=done.metrics | stored.seconds)
        return replace(state, ahead=stored.ahead, pool=stored.pool), done
    # Collect: the policy is frozen while it samples, so all completions of a step are on-policy.
    sampler.engine.load(state.policy.weights, int(state.step), state.entropy_statistics)
    # A task gives the same example for a number: how many were drawn is all the state it has.
    collected = collect(
        sampler,
        recipe,
        networks.mesh,
        int(state.prompts_seen),
        None if state.unfinished is None else to_host(state.unfinished),
    )
    # Where the rollout has a layout of its own, its copy of the weights makes way for the updates.
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
    """The step after its completions were collected."""
    number, scores = int(state.step), scores_of(collected.completions)
    correct = correct_of(collected.completions)
    if shuffle_rewards:
        # A control: an epoch that no shuffle of rows can have, so that no randomness is used twice.
        order = randomness.shuffler(number, -1 % 2**32).permutation(len(scores))
        scores, correct = scores[order], correct[order]
        # Whose turns were worth what is dealt out with them.
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
    # Over all that was sampled: `prepare` may have taken tokens out of the mask of `batch`.
    if state.entropy_statistics is not None:
        found = to_host(temperatures(sampling, batch, sampled, state.entropy_statistics))
        prepared |= {name: float(value) for name, value in found.items()}
    tokens = dict[int, TokenRecord]()
    if watched is not None:
        # Scored before the updates, which give the buffers of these weights away.
        policy = state.policy.weights
        before = collected.completions, collected.batch
        with timed(TO_SHOW, prepared):
            tokens = token_records(networks, policy, *before, batch, watched)
    # By the policy that sampled: before the updates, for the sampler of the next step.
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
    """All optimizer steps of one training step.

    Returns:
      The state, the metrics of each mini-batch under "actor" and "critic", the updates that were
      skipped because they were not finite, and the seconds spent.
    """
    # VC-PPO (arXiv:2503.01491): advantages by a critic that knows nothing yet would mislead the
    # policy, so the critic learns alone first.
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
        # What the critic learns from may be more (T-PPO) or less than what the policy does.
        if name == "critic" and rows.critic_mask is not None:
            rows = replace(rows, mask=rows.critic_mask)
        # Of a row of windows there may be nothing for this network to learn.
        if not recipe.whole_groups:
            rows = without_idle(rows)
        of_rows = None if counts is None else counts.of(name, chosen, recipe.whole_groups)
        if name == "actor":
            learner, metrics = _update_policy(networks, recipe, learner, rows, of_rows)
        else:
            assert networks.critic is not None
            learner, metrics = update_rows(networks.critic, learner, rows, of_rows)
        # Scalars; reading them waits for the update, which makes the timing one of work done.
        history[-1][name] = metrics = to_host(metrics)
        if not metrics["finite"]:
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            nonfinite.append(NonFinite(name, rows, loss, norm))
        seconds[f"timing_s/update_{name}"] += time.perf_counter() - begin
        return learner

    for epoch in range(recipe.epochs):
        for chosen in mini_batches(recipe, randomness.shuffler(int(state.step), epoch)):
            # A gather on the mesh: the batch itself never leaves it.
            rows = take_rows(batch, chosen, networks.mesh)
            history.append({})
            # The critic comes first; neither sees in this step what the other has learned.
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
        # By the policy as it is now: a quantile over the mini-batch moves with every update.
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
    """One optimizer step on a mini-batch.

    Args:
      of_rows: tokens of each row and those of them that count, by which rows are packed; None runs
        them as they stand.
      rows_of_a_bin: at most, where they are packed.
    """
    if of_rows is None:
        return network.update(learner, rows, statistics)
    tokens, counted = of_rows
    if not counted.any():
        # Known to all processes alike; the update would find it out, and move nothing.
        return learner, {"finite": np.True_, "empty": np.True_}
    mesh = network.mesh
    # The sizes in it are static, each set of them a program; `plan` rounds them to a few.
    packed = plan(tokens, counted, rows.tokens.shape[1], network.bins, mesh, rows_of_a_bin)
    network = replace(
        network,
        objective=replace(network.objective, packed=packed.sizes),
        num_micro_batches=packed.num_micro_batches,
    )
    # How many micro-batches have rows is an argument, and compiles nothing anew.
    passes = to_devices(np.int32(packed.passes), replicated(mesh))
    return network.update(learner, place_rows(rows, packed, mesh), statistics, passes)


def mini_batches(recipe: Recipe, shuffler: np.random.Generator) -> np.ndarray:
    """The rows of each mini-batch of an epoch, ``[mini_batches, mini_batch]``.

    Whole groups are shuffled where they fill mini-batches, so that completions can share their
    prompt in a forward pass, and single rows where they do not. Neither the layout nor the
    micro-batch has a say in it: a step is the same however it is cut.
    """
    together = recipe.group_size if recipe.whole_groups else 1
    together = 1 if recipe.mini_batch_size % together else together
    groups = np.arange(recipe.completions).reshape(-1, together)
    return shuffler.permutation(groups).reshape(-1, recipe.mini_batch_size)


def sampling_difference(
    networks: Networks, state: TrainState[Array], batch: Batch[Array]
) -> dict[str, float]:
    """How far sampler and trainer differ, where no update of the policy has measured it
    already nor, for a temperature that adapts, `prepare`."""
    # The policy has not moved in this step: these weights are those that sampled.
    objective, rows = networks.policy.objective, (batch.tokens, batch.valid)
    if objective.sampling.adaptive is not None:
        return {}
    _, again = logprobs_of(objective, state.policy.weights, *rows, objective.replayed(batch))
    # Reduced where they lie: what crosses to the host is a number for each name.
    found = to_host(_compared(again, given(batch.behaviour_logprobs), batch.mask))
    return {name: float(value) for name, value in found["differences"].items() if found["some"]}


@jax.jit
def _compared(logprobs: Array, sampled: Array, mask: Array) -> dict[str, Any]:
    """How far two are from each other, and whether any token counts."""
    return {"differences": difference(logprobs, sampled, mask), "some": jnp.any(mask)}
